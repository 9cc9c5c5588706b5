//! The inputs of this process, and their comparison between ranks before they train.

use hsdp::{CommError, World};
use hsdp_candle::gpt::{Gpt, GptConfig};
use hsdp_program::Warnings;

use super::failure::Failure;
use super::options::{Comm, Options};
use super::output::Output;
use super::ranks::Ranks;
use super::signals::Signals;
use super::text::Corpus;
use super::trace::Recorder;
use super::train::Job;
use super::{bounds, device};

/// The beginning of a text that is compared, if a rank has a problem in place of a text to train on.
const PROBLEM: &str = "problem: ";

/// Everything that this process needs before it trains.
#[derive(Debug)]
pub(crate) struct Inputs {
    options: Options,
    corpus: Corpus,
    gpt: Gpt,
    signals: Signals,
    output: Option<Output>,
}

impl Inputs {
    /// Reads the text, and prepares the folder of `--out` in the process of rank 0.
    ///
    /// # Errors
    /// The problem of this process. The others may have none: [`agree`] tells them.
    pub(crate) fn read(
        ranks: &Ranks,
        options: &Options,
        recorder: &Recorder,
    ) -> Result<Self, Failure> {
        let device = match options.comm {
            Comm::Threads => options.device,
            Comm::Mpi | Comm::Nccl => device::of_process(options.device)?,
        };
        let options = Options { device, ..options.clone() };
        let corpus = Corpus::read(&options)?;
        let Options { layers, width, heads, context, .. } = options;
        let config = GptConfig { vocab: corpus.vocabulary(), context, width, heads, layers };
        let gpt = Gpt::new(config).map_err(Failure::input)?;
        bounds::check(&options, &gpt)?;
        // Files are touched only now: the other input is checked.
        let out = options.out.as_deref().filter(|_| ranks.has_first());
        let output = out.map(|folder| Output::create(folder, recorder)).transpose()?;
        Ok(Self { options, corpus, gpt, signals: Signals::default(), output })
    }

    pub(crate) fn job<'a>(&'a self, warnings: &'a Warnings) -> Job<'a> {
        let Self { options, corpus, gpt, signals, .. } = self;
        Job { options, corpus, gpt: *gpt, signals: signals.clone(), warnings }
    }

    pub(crate) fn output(&self) -> Option<&Output> {
        self.output.as_ref()
    }
}

/// Compares options and text between ranks, since each process has its own command line and files. Texts are compared by their
/// content: their paths may differ. A rank that has a problem tells the others. Collective.
///
/// # Errors
/// One that rank 0 reports for all ranks.
pub(crate) fn agree<'j, 'a>(
    world: &World,
    options: &Options,
    job: Result<&'j Job<'a>, &Failure>,
) -> Result<&'j Job<'a>, Failure> {
    let text = match job {
        Ok(job) => job.corpus.digest().to_string(),
        Err(failure) => format!("{PROBLEM}{failure}"),
    };
    let compared = world.compare("options", &options.shared());
    compared.and_then(|()| world.compare("text", &text)).map_err(|error| refused(world, error))?;
    job.map_err(|failure| told_once(world, failure.to_string()))
}

/// The failure of a comparison. A problem is told with its rank, not with the text of another.
fn refused(world: &World, error: CommError) -> Failure {
    let CommError::ConfigMismatch { ranks, said, .. } = &error else {
        return hsdp::Error::from(error).into();
    };
    let problem_of = |(rank, said): (&hsdp::Rank, &String)| {
        said.strip_prefix(PROBLEM).map(|problem| format!("rank {rank}: {problem}"))
    };
    let problem = ranks.iter().zip(said.iter()).find_map(problem_of);
    told_once(world, problem.unwrap_or_else(|| error.to_string()))
}

fn told_once(world: &World, what: String) -> Failure {
    match world.rank().index() {
        0 => Failure::Input(what),
        _ => Failure::Elsewhere,
    }
}
