//! The inputs of this process, and their comparison between ranks before they train.

use hsdp::World;
use hsdp_models::gpt::{Gpt, GptConfig};
use hsdp_train::Warnings;

use super::bounds;
use super::options::Options;
use super::shared::agreement::{self, Inputs as Compared};
use super::shared::failure::Failure;
use super::shared::output::Output;
use super::shared::ranks::Ranks;
use super::shared::signals::Signals;
use super::shared::trace::Recorder;
use super::text::Corpus;
use super::train::Job;

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
        let options = Options { run: options.run.of_process()?, ..options.clone() };
        let corpus = Corpus::read(&options)?;
        let Options { layers, width, heads, context, .. } = options;
        let config = GptConfig { vocab: corpus.vocabulary(), context, width, heads, layers };
        let gpt = Gpt::new(config).map_err(Failure::input)?;
        bounds::check(&options, &gpt)?;
        // Files are touched only now: the other input is checked.
        let out = options.run.out.as_deref().filter(|_| ranks.has_first());
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

/// Compares options and text between ranks. A rank that has a problem tells the others. Collective.
///
/// # Errors
/// One that rank 0 reports for all ranks.
pub(crate) fn agree<'j, 'a>(
    world: &World,
    options: &Options,
    job: Result<&'j Job<'a>, &Failure>,
) -> Result<&'j Job<'a>, Failure> {
    let digest = job.map(|job| job.corpus.digest().to_string());
    let digest = digest.as_deref().map_err(|failure| *failure);
    agreement::agree(world, Compared { options: &options.shared(), what: "text", digest })?;
    job.map_err(|failure| Failure::Input(failure.to_string()))
}
