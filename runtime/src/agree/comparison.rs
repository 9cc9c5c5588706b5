//! Comparisons of values that must be the same on all ranks: options and plans once, the bits of shards then and again later.

use std::borrow::Cow;

use hsdp_comm::{ModelLabel, ModelName, Stage};
use hsdp_kernels::Wire;
use hsdp_sharding::{Axis, Param, Rank};

use crate::agree::updated::Updated;
use crate::error::Error;
use crate::options::description;
use crate::options::digest;
use crate::state::context::Context;
use crate::state::joint;
use crate::state::shard::Shard;

/// A word that ranks compare: its name, and lists of ranks that must have the same word.
struct Field {
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
const INITIAL: Field = Field { what: "the initial value of a shard", peers: holders_of_each_shard };
const SHARD: Field = Field { what: "the content of a shard", peers: holders_of_each_shard };

fn all(context: &Context) -> Vec<Vec<Rank>> {
    vec![context.plan.mesh().ranks().collect()]
}

fn holders_of_each_shard(context: &Context) -> Vec<Vec<Rank>> {
    let mesh = context.plan.mesh();
    (0..mesh.shard_size()).map(|first| mesh.group(Axis::Replicate, Rank::new(first))).collect()
}

/// The first rank that differs from the majority, and the first rank of the majority; without a majority, the first rank that
/// differs from the first one, and the first one.
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
        of_shards(context, shards, 0)?,
        u64::from(context.world.models()),
    ];
    let tag = context.tag(None, Stage::Setup, 0, 0);
    let said = context.control.exchange(tag, mine, <[u64]>::to_vec)?;
    // A creation that has failed on some ranks alone leaves different numbers, and the largest one
    // is free on all.
    let numbers = said.chunks_exact(mine.len()).filter_map(<[u64]>::last);
    let number = numbers.max().copied().unwrap_or(0);
    let label = ModelLabel { number: u32::try_from(number).unwrap_or(u32::MAX), name };
    // Field by field: "the same shard" has the same meaning on all ranks only where all plans are the same.
    let [names, options, plan, given] =
        [NAME, OPTIONS, PLAN, VALUES].map(|what| Field { what, peers: all });
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

/// Compares the digests of the last update that all ranks have `said`. Collective over the world if they differ.
///
/// # Errors
/// As [`of_models`].
pub(crate) fn of_updates(
    context: &Context,
    last: LastUpdate<'_>,
    said: &[u64],
) -> Result<(), Error> {
    let compared = compare(context, said, &[Field { what: UPDATE, peers: all }]);
    compared.map_err(|error| in_detail(context, last, error))
}

/// Compares the bits of the shards with those of the replicas, before `step`. Collective over the world.
///
/// # Errors
/// As [`of_models`].
pub(crate) fn of_replicas(context: &Context, shards: &[Shard], step: u64) -> Result<(), Error> {
    let mine = [of_shards(context, shards, step)?];
    let tag = context.tag(None, Stage::Setup, step, 0);
    context.control.exchange(tag, mine, |said| compare(context, said, &[SHARD]))?
}

/// The digest of the bits of the shards. A failure is told to the other ranks.
fn of_shards(context: &Context, shards: &[Shard], step: u64) -> Result<u64, Error> {
    let parameters = || shards.iter().map(|shard| shard.in_f32(context));
    joint::run(&context.world, step, || digest::of_parameters(parameters()))
}

/// Compares the words that all ranks have `said`, in rank order. Each rank has a word for each field,
/// and may have more after these.
fn compare(context: &Context, said: &[u64], fields: &[Field]) -> Result<(), Error> {
    let words = said.len() / context.world.size();
    for (word, Field { what, peers }) in fields.iter().enumerate() {
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
    let (rank, other) = (*rank, *other);
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

/// The texts of which a digest was made, each with the name of one of its lines.
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
}
