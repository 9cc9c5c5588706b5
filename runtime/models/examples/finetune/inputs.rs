//! The inputs of this process.

use hsdp::{ModelSpec, Placement, Plan, World};
use hsdp_candle::Recorded;
use hsdp_models::decoder::Decoder;
use hsdp_train::memory::{Limit, Need, product};

use super::batches::Batches;
use super::data::Data;
use super::export::Export;
use super::folder::ModelFolder;
use super::optimizers;
use super::options::Options;
use super::recipe;
use super::shared;
use super::shared::agreement::{self, Inputs as Compared};
use super::shared::failure::Failure;
use super::shared::output::Output;
use super::shared::progress::StepRecord;
use super::shared::ranks::Ranks;
use super::shared::signals::Signals;
use super::shared::trace::Recorder;
use super::text::Text;

/// The steps on a text.
const STEPS: usize = 1000;

/// Everything that this process needs before it trains.
#[derive(Debug)]
pub(crate) struct Inputs {
    pub(crate) options: Options,
    pub(crate) steps: usize,
    pub(crate) data: Data,
    pub(crate) decoder: Decoder,
    pub(crate) recorded: Recorded,
    pub(crate) spec: ModelSpec,
    /// The folder of the model, if its weights are not random.
    pub(crate) folder: Option<ModelFolder>,
    pub(crate) signals: Signals,
    /// In the process of rank 0.
    pub(crate) export: Option<Export>,
}

impl Inputs {
    /// Reads data, `config.json` and the headers of tensors. In the process of rank 0, also
    /// prepares the folders of `--out`, which it returns, and `--export`.
    ///
    /// # Errors
    /// The problem of this process. The others may have none: [`agree`] tells them.
    pub(crate) fn read(
        ranks: &Ranks,
        options: &Options,
        recorder: &Recorder,
    ) -> Result<(Self, Option<Output>), Failure> {
        let options = Options { run: options.run.of_process()?, ..options.clone() };
        let mut folder = options.model.as_deref().map(ModelFolder::read).transpose()?;
        let data = read_data(&options, folder.as_mut())?;
        let steps = steps(&options, &data)?;
        let config = match (&folder, &data) {
            (Some(folder), _) => folder.config().clone(),
            (None, Data::Text(text)) => recipe::small(text.vocabulary(), options.context),
            (None, Data::Batches(_)) => return Err(Failure::input("--batches needs --model")),
        };
        let decoder = recipe::decoder(config, &options);
        let (recorded, spec) = (decoder.recorded()?, decoder.spec().map_err(Failure::input)?);
        let spec = optimizers::declared(spec, &options);
        check_memory(&options, steps, &spec)?;
        // Files are touched only now: the other input is checked.
        let out = options.run.out.as_deref().filter(|_| ranks.has_first());
        let output = out.map(|folder| Output::create(folder, recorder)).transpose()?;
        let to = options.export.as_deref().filter(|_| ranks.has_first());
        let export = to
            .map(|to| Export::prepare(to, folder.as_ref(), decoder.config(), &recorded))
            .transpose()?;
        let signals = Signals::default();
        Ok((
            Self { options, steps, data, decoder, recorded, spec, folder, signals, export },
            output,
        ))
    }
}

fn read_data(options: &Options, folder: Option<&mut ModelFolder>) -> Result<Data, Failure> {
    match (folder, &options.batches) {
        (None, _) => Text::of_characters(options).map(Data::Text),
        (Some(folder), Some(path)) => {
            Batches::read(path, folder.config(), &options.run).map(Data::Batches)
        }
        (Some(folder), None) => {
            let (context, most) = (options.context, folder.config().max_position_embeddings);
            if context > most {
                return Err(Failure::Input(format!(
                    "--context {context}: the model reads at most {most} tokens"
                )));
            }
            Text::of_tokenizer(options, folder).map(Data::Text)
        }
    }
}

fn steps(options: &Options, data: &Data) -> Result<usize, Failure> {
    let Data::Batches(batches) = data else { return Ok(options.steps.unwrap_or(STEPS)) };
    match (options.steps, batches.steps()) {
        (None, 0) => Err(Failure::input("--batches: the file has no steps")),
        (None, there) => Ok(there),
        (Some(asked), there) if asked <= there => Ok(asked),
        (Some(asked), there) => {
            Err(Failure::Input(format!("--steps {asked}: the file of --batches has {there}")))
        }
    }
}

/// Checks that the memory of the sharded model and of the records is within that of the process.
/// Activations are not part of the check: candle allocates them, and the run measures their memory.
fn check_memory(options: &Options, steps: usize, spec: &ModelSpec) -> Result<(), Failure> {
    let with = shared::recipe::model(&options.run).plan_options();
    let plan = Plan::new(spec.clone(), options.run.mesh, with).map_err(Failure::input)?;
    let need =
        Need::default().with("a record of each step", product(&[steps, size_of::<StepRecord>()]));
    let model = plan.memory().total().get().saturating_mul(options.run.ranks_here() as u64);
    let need = match options.run.device {
        Placement::Host => need.with("the sharded model", model),
        _ => need,
    };
    need.check(Limit::of_process()).map_err(Failure::input)
}

/// Compares options, data and the description of the model between ranks. Collective.
///
/// # Errors
/// One that rank 0 reports for all ranks.
pub(crate) fn agree<'i>(
    world: &World,
    options: &Options,
    inputs: Result<&'i Inputs, &Failure>,
) -> Result<&'i Inputs, Failure> {
    let digest = inputs.map(|inputs| {
        format!(
            "{} for {} steps of {:?}",
            inputs.data.digest(),
            inputs.steps,
            inputs.decoder.config()
        )
    });
    let digest = digest.as_deref().map_err(|failure| *failure);
    agreement::agree(world, Compared { options: &options.shared(), what: "data", digest })?;
    inputs.map_err(|failure| Failure::Input(failure.to_string()))
}
