//! Comparisons of values that must be the same on all ranks: options and plans once, the bits of
//! shards then and again later, and the options of each update.

use std::borrow::Cow;
use std::fmt::Write as _;
use std::mem;

use hsdp_comm::{ModelLabel, ModelName, Stage};
use hsdp_kernels::Wire;
use hsdp_sharding::{Axis, BufferId, Param, Rank};

use crate::error::Error;
use crate::options::{description, digest};
use crate::state::buffers::ModelBuffers;
use crate::state::context::{Context, ErrorSite};
use crate::state::control;
use crate::state::shard::Shard;

/// A word that ranks compare: its name, and lists of ranks that must have the same word.
struct ComparedWord {
    what: &'static str,
    peers: fn(&Context) -> Vec<Vec<Rank>>,
}

/// Differences about which [`in_detail`] can say more.
const OPTIONS: &str = "the digest of the model's options";
const PLAN: &str = "the fingerprint of the plan";
pub(crate) const MODEL: &str = "the digest of the model's options and plan";
pub(crate) const UPDATE: &str = "the digest of the optimizer's options";

/// The update of the last of the `finished` steps, which has another text from step to step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LastUpdate<'a> {
    pub(crate) updated: &'a Updated,
    pub(crate) finished: u64,
}

const NAME: &str = "the digest of the model's name";
const VALUES: &str = "the initial value of a parameter";
const INITIAL: ComparedWord =
    ComparedWord { what: "the initial value of a shard", peers: holders_of_each_shard };
const SHARD: ComparedWord =
    ComparedWord { what: "the content of a shard", peers: holders_of_each_shard };

const BUFFER: ComparedWord = ComparedWord { what: "the content of a buffer", peers: all };

fn all(context: &Context) -> Vec<Vec<Rank>> {
    vec![context.plan.mesh().ranks().collect()]
}

fn holders_of_each_shard(context: &Context) -> Vec<Vec<Rank>> {
    let mesh = context.plan.mesh();
    (0..mesh.shard_size()).map(|first| mesh.group(Axis::Replicate, Rank::new(first))).collect()
}

/// Returns the first rank that differs from the majority, and the first rank of the majority;
/// without a majority, the first rank that differs from the first one, and the first one.
pub(crate) fn odd_one(values: &[u64]) -> Option<[usize; 2]> {
    let place_of = |value: u64| values.iter().position(|other| *other == value);
    let is_most = |value: &&u64| values.iter().filter(|it| it == value).count() * 2 > values.len();
    let usual = *values.iter().find(is_most).or(values.first())?;
    let odd = values.iter().position(|value| *value != usual)?;
    Some([odd, place_of(usual)?])
}

/// Digests of the full values that a program gave to parameters. The values of a parameter that is
/// stored in 16 bits are rounded first.
#[derive(Debug, Default)]
pub(crate) struct InitialValues(Vec<String>);

impl InitialValues {
    /// Notes the full values of the next parameter.
    pub(crate) fn note(&mut self, parameter: &Param, values: &[f32]) {
        let dtype = parameter.stored.map_or(Ok(Wire::F32), Wire::try_from).unwrap_or_default();
        let digest = digest::of_rounded(values, dtype);
        self.0.push(format!("`{}` with digest {digest:#018x}", parameter.name));
    }
}

/// Compares name, options, plan, the program's initial values and initial shards with the other
/// ranks, and returns the model's number and name. Collective over the world.
///
/// # Errors
/// [`Error::Disagreement`] on all ranks, which names the first rank that differs; [`Error::Comm`].
pub(crate) fn of_models(
    context: &Context,
    shards: &[Shard],
    values: &InitialValues,
) -> Result<ModelLabel, Error> {
    let name = context.options.name.as_deref().and_then(ModelName::new);
    let mine = [
        name.map_or(0, |name| digest::of_text(name.as_str()).max(1)),
        context.options_digest,
        context.plan.fingerprint(),
        digest::of_lines(&values.0),
        of_shards(context.site("init", 0), shards)?,
        u64::from(context.world.models()),
    ];
    let tag = context.tag(None, Stage::Setup, 0, 0);
    let said = context.control.exchange(tag, mine, <[u64]>::to_vec)?;
    // A creation that has failed on some ranks alone leaves different numbers, and the largest one
    // is free on all.
    let numbers = said.chunks_exact(mine.len()).filter_map(<[u64]>::last);
    let number = numbers.max().copied().unwrap_or(0);
    let label = ModelLabel { number: u32::try_from(number).unwrap_or(u32::MAX), name };
    // Field by field: "the same shard" has the same meaning on all ranks only where all
    // plans are the same.
    let [names, options, plan, given] =
        [NAME, OPTIONS, PLAN, VALUES].map(|what| ComparedWord { what, peers: all });
    let fields = [names, options, plan, given, INITIAL];
    compare(context, &said, &fields).map_err(|error| {
        let last = LastUpdate { updated: &Updated::default(), finished: 0 };
        match &error {
            Error::Disagreement { what, .. } if what == NAME => of_names(context, label, error),
            Error::Disagreement { what, rank, other, .. } if what == VALUES => {
                let detailed = by_lines(context, VALUES.into(), &values.0, [*rank, *other]);
                detailed.unwrap_or_else(Some).unwrap_or(error)
            }
            _ => in_detail(context, last, error),
        }
    })?;
    context.world.count_models(label.number.saturating_add(1));
    Ok(label)
}

/// Replaces a difference between names by the number and the name on both ranks. Collective over
/// the world.
fn of_names(context: &Context, label: ModelLabel, error: Error) -> Error {
    let Error::Disagreement { rank, other, .. } = error else { return error };
    match first_difference(context, [rank, other], &[label.to_string()]) {
        Ok(Some([got, want])) => {
            Error::Disagreement { what: "the model that is made".into(), rank, got, other, want }
        }
        Ok(None) => error,
        Err(failed) => failed,
    }
}

/// Compares the digests of the last update that all ranks have `said`. Collective over the world if
/// they differ.
///
/// # Errors
/// As [`of_models`].
pub(crate) fn of_updates(
    context: &Context,
    last: LastUpdate<'_>,
    said: &[u64],
) -> Result<(), Error> {
    let compared = compare(context, said, &[ComparedWord { what: UPDATE, peers: all }]);
    compared.map_err(|error| in_detail(context, last, error))
}

/// Compares the bits that replicas have in common of their shards, and those of the buffers with
/// those of all ranks, before `step`. Collective over the world.
///
/// # Errors
/// As [`of_models`]. The error of a buffer has its name.
pub(crate) fn of_replicas(
    context: &Context,
    shards: &[Shard],
    buffers: &ModelBuffers,
    step: u64,
) -> Result<(), Error> {
    let of_shards = of_shards(context.site("begin_step", step), shards)?;
    let tag = context.tag(None, Stage::Setup, step, 0);
    let lines: Vec<String> = buffers.committed().map(|it| of_buffer(context, it)).collect();
    if lines.is_empty() {
        let compare = |said: &[u64]| compare(context, said, &[SHARD]);
        return context.control.exchange(tag, [of_shards], compare)?;
    }
    let mine = [of_shards, digest::of_lines(&lines)];
    let compare = |said: &[u64]| compare(context, said, &[SHARD, BUFFER]);
    let compared = context.control.exchange(tag, mine, compare)?;
    compared.map_err(|error| match &error {
        Error::Disagreement { what, rank, other, .. } if what == BUFFER.what => {
            let detailed = by_lines(context, BUFFER.what.into(), &lines, [*rank, *other]);
            detailed.unwrap_or_else(Some).unwrap_or(error)
        }
        _ => error,
    })
}

/// Returns the line of a buffer that ranks compare.
fn of_buffer(context: &Context, (id, values): (BufferId, &[f32])) -> String {
    let digest = digest::of_rounded(values, Wire::F32);
    format!("`{}` with digest {digest:#018x}", context.plan.spec()[id].name)
}

/// Returns the digest of the bits of the shards that replicas have in common. A failure is told to
/// the other ranks.
fn of_shards(site: ErrorSite<'_>, shards: &[Shard]) -> Result<u64, Error> {
    let parameters = || shards.iter().map(|shard| shard.shared_in_f32(site));
    let world = &site.context.world;
    control::between_steps(world, site.step, || digest::of_parameters(parameters()))
}

/// Compares the words that all ranks have `said`, in rank order. Each rank has a word for each
/// field, and may have more after these.
fn compare(context: &Context, said: &[u64], fields: &[ComparedWord]) -> Result<(), Error> {
    let words = said.len() / context.world.size();
    for (word, ComparedWord { what, peers }) in fields.iter().enumerate() {
        for peers in peers(context) {
            let value = |rank: &Rank| said[rank.index() * words + word];
            let values: Vec<u64> = peers.iter().map(value).collect();
            if let Some(places) = odd_one(&values) {
                let [got, want] = places.map(|place| format!("{:#018x}", values[place]));
                let [rank, other] = places.map(|place| peers[place]);
                return Err(Error::Disagreement { what: (*what).into(), rank, got, other, want });
            }
        }
    }
    Ok(())
}

/// Replaces a difference between digests by the first line of text in which the two ranks differ.
///
/// Collective over the world: all ranks have found the same error.
pub(crate) fn in_detail(context: &Context, last: LastUpdate<'_>, error: Error) -> Error {
    let Error::Disagreement { what: digest, rank, other, .. } = &error else { return error };
    let rank = *rank;
    let other = *other;
    for (what, lines) in texts_behind(digest, context, last) {
        match by_lines(context, what, &lines, [rank, other]) {
            Ok(Some(detailed)) | Err(detailed) => return detailed,
            Ok(None) => {}
        }
    }
    // The planners have different versions, say.
    error
}

/// Returns the disagreement of two ranks about a text, with the first line that differs. `None` if
/// no line differs.
fn by_lines(
    context: &Context,
    what: Cow<'static, str>,
    lines: &[String],
    ranks: [Rank; 2],
) -> Result<Option<Error>, Error> {
    let [rank, other] = ranks;
    let differing = first_difference(context, ranks, lines)?;
    Ok(differing.map(|[got, want]| Error::Disagreement { what, rank, got, other, want }))
}

/// Returns the texts of which a digest was made, each with the name of one of its lines.
fn texts_behind(
    digest: &str,
    context: &Context,
    last: LastUpdate<'_>,
) -> Vec<(Cow<'static, str>, Vec<String>)> {
    let options = || ("an option of the model".into(), description::of_options(&context.options));
    let spec = || ("the model spec".into(), description::of_model(context.plan.spec()));
    match digest {
        OPTIONS => vec![options()],
        PLAN => vec![spec()],
        MODEL => vec![options(), spec()],
        UPDATE => {
            let LastUpdate { updated, finished } = last;
            let step = finished.saturating_sub(1);
            let what = format!("an option of the optimizer in step {step}");
            vec![(what.into(), updated.lines(finished))]
        }
        _ => Vec::new(),
    }
}

/// Returns the first line that differs between two ranks, as each of them has it. Collective over
/// the world.
pub(crate) fn first_difference(
    context: &Context,
    ranks: [Rank; 2],
    lines: &[String],
) -> Result<Option<[String; 2]>, Error> {
    let tag = context.tag(None, Stage::Setup, 0, 0);
    let mine = lines.join("\n");
    let mut texts = Vec::with_capacity(ranks.len());
    for rank in ranks {
        texts.push(context.control.text_of(tag, rank, &mine)?);
    }
    let [got, want] = [&texts[0], &texts[1]].map(|text| text.split('\n'));
    Ok(differing_line(got, want))
}

fn differing_line<'a>(
    mut got: impl Iterator<Item = &'a str>,
    mut want: impl Iterator<Item = &'a str>,
) -> Option<[String; 2]> {
    loop {
        let lines = [got.next(), want.next()];
        match lines {
            [None, None] => return None,
            [got, want] if got != want => {
                return Some(lines.map(|line| line.unwrap_or("nothing more").to_owned()));
            }
            _ => {}
        }
    }
}

/// The digest of no update.
const NO_UPDATE: u64 = 0;

/// Bytes of lines for which there is room from the first update on: a later one with longer numbers
/// allocates nothing.
const ROOM: usize = 512;

/// How the last step that has an update was updated: the options with which this rank has updated
/// its shards. The ranks compare them, since the replicas of a shard stay equal only under equal
/// updates. PROTOCOL.md, "Updates".
#[derive(Debug, Default)]
pub(crate) struct Updated {
    /// The number of steps that were finished then, that one included.
    finished: u64,
    lines: String,
    digest: u64,
}

impl Updated {
    /// Returns the memory of the lines of an update, which [`note`](Self::note) takes again.
    pub(crate) fn room(&mut self) -> String {
        let mut lines = mem::take(&mut self.lines);
        lines.clear();
        lines.reserve(ROOM);
        lines
    }

    /// Notes the options of an update, one line each, the norm to which the gradients were clipped,
    /// and lines of how they were clipped besides. The update is that of the last of the `finished`
    /// steps.
    pub(crate) fn note(
        &mut self,
        finished: u64,
        options: String,
        max_norm: Option<f64>,
        clipped: &str,
    ) {
        self.lines = options;
        if !matches!(self.lines.as_bytes(), [] | [.., b'\n']) {
            self.lines.push('\n');
        }
        let written = match max_norm {
            Some(norm) => writeln!(self.lines, "gradients clipped to {norm:?}"),
            None if clipped.is_empty() => writeln!(self.lines, "gradients that are not clipped"),
            None => Ok(()),
        };
        written.expect("a string takes any text");
        self.lines.push_str(clipped);
        self.digest = digest::of_text(&self.lines).max(NO_UPDATE + 1);
        self.finished = finished;
    }

    /// Returns a digest of the update of the last of the `finished` steps, which ranks compare. All
    /// steps without an update have the same.
    pub(crate) fn digest(&self, finished: u64) -> u64 {
        if self.finished == finished { self.digest } else { NO_UPDATE }
    }

    /// Returns the lines of that update.
    pub(crate) fn lines(&self, finished: u64) -> Vec<String> {
        let lines = if self.finished == finished { &*self.lines } else { "no update" };
        lines.lines().map(str::to_owned).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_odd_one_differs_from_most_or_from_the_first() {
        assert_eq!(odd_one(&[5, 5, 5]), None);
        assert_eq!(odd_one(&[4, 5, 5]), Some([0, 1]));
        assert_eq!(odd_one(&[5, 5, 4]), Some([2, 0]));
        assert_eq!(odd_one(&[4, 5]), Some([1, 0]));
        assert_eq!(odd_one(&[4, 5, 6]), Some([1, 0]));
    }

    #[test]
    fn the_first_line_that_differs_is_found_also_where_one_text_ends() {
        let line =
            |got: &'static str, want: &'static str| differing_line(got.lines(), want.lines());
        assert_eq!(line("a\nb\nc", "a\nB\nC"), Some(["b", "B"].map(str::to_owned)));
        assert_eq!(line("a\nb", "a"), Some(["b", "nothing more"].map(str::to_owned)));
        assert_eq!(line("a\nb", "a\nb"), None);
    }

    fn noted(finished: u64, options: &str) -> Updated {
        let mut updated = Updated::default();
        updated.note(3, "of an older step\n".to_owned(), Some(0.5), "");
        updated.note(finished, options.to_owned(), None, "");
        updated
    }

    #[test]
    fn the_digest_is_that_of_the_last_update_and_of_no_other_step() {
        let [one, other] = ["adamw eps 1e-8\n", "adamw eps 1e-9\n"].map(|it| noted(7, it));
        assert_eq!(one.digest(7), noted(7, "adamw eps 1e-8\n").digest(7));
        assert_ne!(one.digest(7), other.digest(7));
        assert_eq!([one.digest(8), Updated::default().digest(0)], [NO_UPDATE; 2]);
    }

    #[test]
    fn the_lines_are_those_of_the_options_and_of_the_clipping() {
        let lines = ["adamw eps 1e-8", "gradients that are not clipped"];
        assert_eq!(noted(7, "adamw eps 1e-8\n").lines(7), lines);
        assert_eq!(noted(7, "adamw eps 1e-8").lines(7), lines);
        assert_eq!(noted(7, "").lines(7), lines[1..]);
        assert_eq!(noted(7, "").lines(9), ["no update"]);
    }
}
