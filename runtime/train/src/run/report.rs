//! The end of a run: the printed report, and `summary.json`.

use comfy_table::Table;
use hsdp::checkpoint::Checkpointed;
use hsdp::memory::{self, Category};
use hsdp::{ByteCount, ElemCount, Mesh};
use serde_json::{Value, json};

use super::Run;
use super::costs::{PlannedAndMeasured, RankCosts, check_traffic};
use super::saving::RunSaving;
use crate::failure::Failure;
use crate::folder::{RunFiles, StepRecord, plot};
use crate::stdout;
use crate::stdout::table;

/// How training ended. It is equal on all ranks.
#[derive(Clone, Debug, Default)]
pub(crate) struct RunEnd {
    /// Steps made, including those before the run was resumed.
    pub(crate) steps: u64,
    /// Whether a signal has ended the run. The signal may have come to another process.
    pub(crate) was_stopped: bool,
    /// Checkpoint that was not saved, with the reason.
    pub(crate) unsaved: Option<String>,
}

/// The results of a run on a rank. Those of rank 0 are printed, and written into the folder of
/// `--out`; a program adds its own to them.
#[derive(Debug)]
pub struct Report {
    ended: RunEnd,
    first: Option<First>,
}

/// The results of rank 0.
#[derive(Debug)]
struct First {
    records: Vec<StepRecord>,
    program: &'static str,
    mesh: Mesh,
    /// Reason why no further step was made, in words.
    reason: String,
    /// The costs of each rank.
    costs: Vec<RankCosts>,
    loss: &'static str,
    warnings: u64,
    rows: Vec<[String; 2]>,
    /// The object of `summary.json`.
    fields: Value,
    memory: Vec<[String; 2]>,
    text: String,
    failure: Option<Failure>,
}

impl Report {
    /// Ends the run on all ranks. Collective.
    pub(super) fn of<O: Checkpointed>(
        run: &mut Run<'_, O>,
        costs: RankCosts,
    ) -> Result<Self, Failure> {
        let warnings = run.count_warnings()?;
        let costs = costs.of_all(run.model.world())?;
        run.model.end_run()?;
        let ended = RunEnd {
            steps: run.next,
            was_stopped: run.was_stopped,
            unsaved: run.saving.as_ref().and_then(RunSaving::unsaved),
        };
        let Some(progress) = run.progress.take() else {
            return Ok(Self { ended, first: None });
        };
        let records = progress.finish()?;
        let spec = run.model.plan().spec();
        let options = run.options();
        let ElemCount(elements) = spec.numel();
        let units = spec.units().len();
        let [first, last] =
            [records.first(), records.last()].map(|record| record.map(|it| it.loss));
        let applied = records.iter().filter(|record| record.applied).count();
        let seconds: f64 = records.iter().map(|record| record.seconds).sum();
        let tokens: u64 = records.iter().map(|record| record.tokens).sum();
        let fields = json!({
            "mesh": options.mesh.to_string(),
            "steps": records.len(),
            "applied": applied,
            "microbatches": options.microbatches,
            "param_dtype": options.param_dtype.to_string(),
            "reduce_dtype": options.reduce_dtype.to_string(),
            "accumulation": options.accumulation.to_string(),
            "state_over": options.state_over.to_string(),
            "parameters": elements,
            "units": units,
            "loss": { "first": first, "last": last },
            "seconds": seconds,
            "warnings": warnings,
        });
        let mut report = First {
            program: run.setup.program(),
            mesh: options.mesh,
            reason: run.reason(),
            costs,
            loss: run.training.loss,
            warnings,
            rows: Vec::new(),
            fields,
            memory: Vec::new(),
            text: String::new(),
            failure: None,
            records,
        };
        let best = run.evaluations.past().best;
        if let Some(best) = best {
            report.fields["best_evaluation"] = best.into();
        }
        let mut rows = Vec::new();
        let mut row = |name: &str, value: String| rows.push([name.to_owned(), value]);
        row("parameters", format!("{elements} in {units} units"));
        row("loss, first step", shown(first));
        row("loss, last step", shown(last));
        if let Some(best) = best {
            row("best evaluation", format!("{best:.4}"));
        }
        if run.evaluations.is_enough() {
            row("ended", report.reason.clone());
        }
        let loaded = memory::usage(run.model.rank(), Category::Load).peak;
        report.fields["peak_load_bytes"] = loaded.get().into();
        if loaded > ByteCount::ZERO {
            report.memory.push(["load of a checkpoint".to_owned(), loaded.to_string()]);
        }
        row("speed", format!("{:.0} tokens/s", tokens as f64 / seconds));
        let skipped = report.records.len() - applied;
        if skipped > 0 {
            row("skipped", format!("{skipped} steps, in which a gradient overflowed"));
        }
        report.rows = rows;
        Ok(Self { ended, first: Some(report) })
    }

    /// Returns the number of steps that this run made on rank 0; 0 on other ranks.
    #[must_use]
    pub fn steps_made(&self) -> usize {
        self.first.as_ref().map_or(0, |first| first.records.len())
    }

    /// Returns whether a signal has ended the run.
    #[must_use]
    pub fn was_stopped(&self) -> bool {
        self.ended.was_stopped
    }

    /// Adds a row to the printed table, after those before it.
    pub fn row(&mut self, name: &str, value: impl Into<String>) {
        if let Some(first) = &mut self.first {
            first.rows.push([name.to_owned(), value.into()]);
        }
    }

    /// Adds a field to `summary.json`.
    pub fn field(&mut self, name: &str, value: impl Into<Value>) {
        if let Some(first) = &mut self.first {
            first.fields[name] = value.into();
        }
    }

    /// Adds a row to the table of memory, which was measured without a plan.
    pub fn memory(&mut self, name: &str, measured: ByteCount) {
        if let Some(first) = &mut self.first {
            first.memory.push([name.to_owned(), measured.to_string()]);
        }
    }

    /// Adds a paragraph below the tables.
    pub fn text(&mut self, text: &str) {
        if let Some(first) = &mut self.first {
            first.text = format!("{}\n{text}\n", first.text);
        }
    }

    /// Lets the program fail after the report is written and printed: work after the training has
    /// failed, such as an export.
    pub fn fail(&mut self, failure: impl Into<Failure>) {
        if let Some(first) = &mut self.first {
            first.failure.get_or_insert(failure.into().in_training());
        }
    }

    /// Joins the reports of the ranks of this process. Returns the end of the run, and the report
    /// of rank 0, if it is among them.
    pub(crate) fn of_all(reports: Vec<Self>) -> (RunEnd, Option<Self>) {
        let ended = reports.last().map(|report| report.ended.clone()).unwrap_or_default();
        (ended, reports.into_iter().find(|report| report.first.is_some()))
    }

    /// Writes `summary.json` and `loss.svg`, and prints the tables of rank 0. Files stay as they
    /// are if all steps were made before this run.
    ///
    /// # Errors
    /// The failure of [`fail`](Self::fail), or else that of a file or of stdout.
    pub(crate) fn publish(mut self, files: Option<&RunFiles>) -> Result<(), Failure> {
        let failure = self.first.as_mut().and_then(|first| first.failure.take());
        let shown = self.show(files);
        failure.map_or(shown, Err)
    }

    fn show(&self, files: Option<&RunFiles>) -> Result<(), Failure> {
        let Some(first) = &self.first else { return Ok(()) };
        if first.records.is_empty() {
            let text = format!("{}\n{}", first.reason, first.text);
            return Ok(stdout::print(text)?);
        }
        // The files come first: a stdout that takes no more does not lose them.
        if let Some(files) = files {
            let mut summary = first.fields.clone();
            let ranks = first.costs.iter().enumerate();
            let ranks: Vec<Value> = ranks.map(|(rank, costs)| costs.summary(rank)).collect();
            summary["ranks"] = ranks.into();
            files.write_summary(&summary)?;
            plot::loss(&files.plot(), &first.records, first.loss)?;
        }
        let exactness = check_traffic(&first.costs);
        let said = exactness.as_ref().map_or_else(ToString::to_string, Clone::clone);
        stdout::print(format!(
            "{}\n\n{}\n{said}\n\n{}\n{}",
            first.overview(),
            first.traffic_table(),
            first.memory_table(),
            first.text,
        ))?;
        exactness.map(drop)
    }
}

impl First {
    fn overview(&self) -> Table {
        let mut rows = self.rows.clone();
        if self.warnings > 0 {
            rows.push(["warnings".to_owned(), self.warnings.to_string()]);
        }
        table([self.program, &format!("{} steps on mesh {}", self.records.len(), self.mesh)], rows)
    }

    /// Returns the collectives of rank 0 in a step.
    fn traffic_table(&self) -> Table {
        let a_step = |total: u64| (total / self.records.len() as u64).to_string();
        let costs = self.costs.first().into_iter().flat_map(RankCosts::traffic);
        let rows = costs.map(|(name, PlannedAndMeasured { planned, measured })| {
            let [calls_planned, calls] = [planned, measured].map(|flow| a_step(flow.calls));
            let [bytes_planned, bytes] = [planned, measured].map(|flow| a_step(flow.bytes.get()));
            [name.to_owned(), calls_planned, calls, bytes_planned, bytes]
        });
        table(["a step of rank 0", "calls planned", "measured", "bytes planned", "measured"], rows)
    }

    /// Returns the peak memory of rank 0 by category.
    fn memory_table(&self) -> Table {
        let used =
            |it: &PlannedAndMeasured<ByteCount>| it.planned.max(it.measured) > ByteCount::ZERO;
        let costs = self.costs.first().into_iter().flat_map(|costs| &costs.memory);
        let planned = costs.filter(|(_, compared)| used(compared)).map(|(category, compared)| {
            [category.clone(), compared.planned.to_string(), compared.measured.to_string()]
        });
        let own = self
            .memory
            .iter()
            .map(|[name, measured]| [name.clone(), String::new(), measured.clone()]);
        table(["peak memory of rank 0", "planned", "measured"], planned.chain(own))
    }
}

fn shown(loss: Option<f64>) -> String {
    format!("{:.4}", loss.unwrap_or(f64::NAN))
}
