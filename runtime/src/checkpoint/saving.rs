//! A save that is under way: the agreement of ranks, this rank's part, and the commit.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use hsdp_checkpoint::{
    Committed, Draft, DraftPlace, Elements, Head, Lease, MOST_USER_BYTES, MeshShape, OptimizerHead,
    Slice, Store, TrainingHead, Writer, nonce,
};
use hsdp_kernels::{Values, Wire};
use hsdp_sharding::{ModelSpec, Rank};
use serde_json::Value;

use super::frozen;
use super::portions::{self, WrittenFrom, WrittenPortion};
use super::settings::Content;
use super::together::{Failed, JointOperation};
use crate::error::Error;
use crate::model::ShardedModel;
use crate::options::digest;
use crate::persist::checkpointed::Checkpointed;
use crate::persist::problem::Problem;
use crate::state::context::ModelId;
use crate::state::shard::HostShard;

/// The operation of all ranks.
pub(super) fn saving(model: &ShardedModel) -> JointOperation<'_> {
    JointOperation::new(&model.engine.context, "saving", model.committed_steps())
}

/// The nonce of rank 0 where the generation is there already.
pub(super) const EXISTS: u64 = 0;

/// The nonce of a new generation.
pub(super) fn fresh() -> u64 {
    nonce().max(EXISTS + 1)
}

/// A save that is under way.
pub(super) struct RankSave<'a, O> {
    store: &'a Store,
    /// Number of the checkpoints.
    number: u32,
    model: &'a ShardedModel,
    optimizer: &'a O,
    user: &'a Value,
    pub(super) step: u64,
    /// This rank's part of the digest of the frozen parameters, if these are left out.
    frozen: Option<u64>,
    of_optimizer: OptimizerHead,
    /// `user`, the optimizer's options and those with which it was made, as JSON.
    texts: [String; 3],
}

impl<'a, O: Checkpointed> RankSave<'a, O> {
    pub(super) fn of(
        store: &'a Store,
        number: u32,
        model: &'a ShardedModel,
        optimizer: &'a O,
        user: &'a Value,
        frozen: Option<u64>,
    ) -> Self {
        let of_optimizer = optimizer.head(model.plan().spec());
        let OptimizerHead { options, made_with, .. } = &of_optimizer;
        let made_with = made_with.as_ref().map_or_else(String::new, Value::to_string);
        let texts = [user.to_string(), options.to_string(), made_with];
        let step = model.committed_steps();
        Self { store, number, model, optimizer, user, step, frozen, of_optimizer, texts }
    }

    fn content(&self) -> Content {
        if self.frozen.is_some() { Content::Trainable } else { Content::All }
    }

    pub(super) fn together(&self) -> JointOperation<'_> {
        saving(self.model).about(self.number)
    }

    pub(super) fn identity(&self) -> SaveIdentity {
        let model = self.model.id().clone();
        let state = self.model.engine.state();
        let buffers = digest::of_rounded(state.buffers.all_committed(), Wire::F32);
        let loads = state.loads;
        SaveIdentity { model, loads, step: self.step, buffers, digests: self.digests() }
    }

    fn digests(&self) -> [u64; 3] {
        self.texts.each_ref().map(|text| digest::of_text(text))
    }

    /// Rank 0 makes the directory.
    pub(super) fn begin<'l>(
        &self,
        lease: Option<&'l mut Lease>,
        place: &DraftPlace,
    ) -> Result<Option<Draft<'l>>, Error> {
        let begin = |lease: &'l mut Lease| lease.begin_at(place.clone());
        self.together().run(|| Ok(lease.map(begin).transpose()?))
    }

    /// All ranks write their parts.
    pub(super) fn write(&self, place: &DraftPlace) -> Result<(), Error> {
        self.together().run(|| {
            let contents = SavedContents::of(self.model, self.optimizer, self.content())?;
            place.write(self.writer(), &contents.slices())?;
            Ok(())
        })
    }

    /// Returns the place that rank 0 has chosen for the files, and the manifest's head. Collective
    /// over the world.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] if `user` or the options of the optimizer differ between ranks,
    /// [`Error::Disagreement`] if they differed in the last update; [`Error::Comm`].
    pub(super) fn agree(&self, nonce: u64) -> Result<(DraftPlace, Head), Error> {
        let engine = &self.model.engine;
        let [user, options, made_with] = self.digests();
        let hint = engine.state().last_weight;
        let frozen = self.frozen.unwrap_or(0);
        let said = [engine.digest_of_update(), user, options, hint, nonce, frozen, made_with];
        let said = self.together().tell(said)?;
        let said = |word: usize| said.iter().map(|it| it[word]).collect::<Vec<_>>();
        engine.compare_updates(&said(0))?;
        for (what, word) in [
            ("the value `user` is", 1),
            ("the options of its optimizer are", 2),
            ("the options with which its optimizer was made are", 6),
        ] {
            let text = |_, _, other| format!("{what} not the same as on rank {other}");
            self.together().check_same(&said(word), text)?;
        }
        self.check_size()?;
        let hint = said(3).into_iter().max().unwrap_or(0);
        let frozen = self.frozen.map(|_| frozen::of_parts(&engine.context, &said(5)));
        Ok((self.store.place(self.step, said(4)[0]), self.head(hint, frozen)))
    }

    pub(super) fn writer(&self) -> Writer {
        Writer { index: self.model.rank().index(), of: self.model.world().size() }
    }

    /// # Errors
    /// [`Error::Checkpoint`] if a manifest cannot hold one of these texts, which are the same on
    /// all ranks.
    fn check_size(&self) -> Result<(), Error> {
        let options = "the options of the optimizer have";
        let names = ["the value `user` has", options, options];
        let sizes = names.into_iter().zip(self.texts.iter().map(String::len));
        let Some((name, size)) = sizes.into_iter().find(|(_, size)| *size > MOST_USER_BYTES) else {
            return Ok(());
        };
        let what = format!("{name} {size} bytes as JSON, more than {MOST_USER_BYTES}");
        let problem = Problem::lasting(what);
        Err(self.together().error(Failed { rank: Rank::new(0), problem }))
    }

    /// Makes a generation, on rank 0, of the parts that all ranks have written. Returns its
    /// directory, on rank 0, or puts it into `made` if the ranks do not learn of it.
    pub(super) fn commit(
        &self,
        draft: Option<Draft<'_>>,
        head: Head,
        made: &mut Option<MadeGeneration>,
    ) -> Result<Option<PathBuf>, Error> {
        let writers = self.model.world().size();
        let mut path = None;
        let agreed = self.together().run(|| {
            path = draft.map(|draft| draft.commit(head, writers)).transpose()?.map(told);
            Ok(())
        });
        if agreed.is_err() {
            *made = path.take().map(|path| MadeGeneration { identity: self.identity(), path });
        }
        agreed.map(|()| path)
    }

    fn head(&self, weight_hint: u64, frozen_digest: Option<u64>) -> Head {
        let state = self.model.engine.state();
        let mesh = self.model.plan().mesh();
        let [replicate, shard] = [mesh.replicate_size(), mesh.shard_size()].map(|it| it as u64);
        let loss_scale = state.loss_scale.saved();
        let applied = state.applied;
        Head {
            step: self.step,
            mesh: MeshShape { replicate, shard },
            training: TrainingHead { loss_scale, weight_hint, applied_steps: Some(applied) },
            optimizer: Some(self.of_optimizer.clone()),
            user: self.user.clone(),
            frozen_digest,
            settings: settings_of(self.model.plan().spec()),
            buffers: self.model.plan().spec().buffers().map(|(_, it)| it.name.clone()).collect(),
        }
    }
}

/// The identity of a save: the parameters after a number of steps and of loads, and digests of the
/// buffers, of `user` and of the optimizer's options. A step whose gradients are dropped changes
/// buffers, and no number of steps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SaveIdentity {
    pub(super) model: ModelId,
    pub(super) loads: u64,
    pub(super) step: u64,
    buffers: u64,
    pub(super) digests: [u64; 3],
}

/// A generation whose save failed after rank 0 had made it: the other ranks have not learned of it.
/// The next call of the same save returns it.
#[derive(Debug)]
pub(super) struct MadeGeneration {
    pub(super) identity: SaveIdentity,
    pub(super) path: PathBuf,
}

impl MadeGeneration {
    /// Its directory, if it is of this save.
    pub(super) fn path_of(&self, identity: &SaveIdentity) -> Option<&Path> {
        (self.identity == *identity).then_some(&self.path)
    }
}

/// Returns the checkpoint's directory. Work that failed after the commit is logged, and is not a
/// failure of the save.
pub(super) fn told(committed: Committed) -> PathBuf {
    for error in committed.left_undone {
        hsdp_warnings::warn!(
            %error,
            "the checkpoint is saved; the part that failed is tried again with the next"
        );
    }
    committed.path
}

fn settings_of(spec: &ModelSpec) -> BTreeMap<String, String> {
    spec.settings().map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
}

/// The elements that this rank writes, in place where possible.
struct SavedContents<'a> {
    written: Vec<WrittenPortion>,
    /// Shards, by unit.
    shards: Vec<HostShard>,
    /// Values of state and of buffers, by `written`; empty for parameters.
    values: Vec<Cow<'a, [f32]>>,
}

impl<'a> SavedContents<'a> {
    fn of<O: Checkpointed>(
        model: &ShardedModel,
        optimizer: &'a O,
        content: Content,
    ) -> Result<Self, Error> {
        let context = &model.engine.context;
        let shards = model.engine.state().shards.clone();
        let written = portions::to_write(context, optimizer, content);
        let values = |written: &WrittenPortion| match &written.source {
            WrittenFrom::Shard { .. } => Ok(Cow::Borrowed(&[][..])),
            WrittenFrom::State { kind, parameter, range } => {
                let state = optimizer.state(model, kind, *parameter, range.clone())?;
                Ok(state.expect("an optimizer has the tensors that it names"))
            }
            WrittenFrom::Buffer { buffer, len } => {
                let mut copy = hsdp_kernels::zeros(*len)?;
                copy.copy_from_slice(model.engine.state().buffers.committed_value(*buffer));
                Ok(Cow::Owned(copy))
            }
            WrittenFrom::BufferState { state, len } => {
                let mut copy = hsdp_kernels::zeros(*len)?;
                let copied = optimizer.copy_buffer_state(*state, &mut copy);
                assert!(copied, "an optimizer has the tensors that it names");
                Ok(Cow::Owned(copy))
            }
        };
        let values = written.iter().map(values).collect::<Result<_, Error>>()?;
        let site = model.site("saving");
        let shards = shards.iter().map(|shard| shard.on_host(site)).collect::<Result<_, _>>()?;
        Ok(Self { written, shards, values })
    }

    fn slices(&self) -> Vec<Slice<'_>> {
        let slices = self.written.iter().zip(&self.values).map(|(written, values)| {
            let values = match &written.source {
                WrittenFrom::Shard { unit, range } => {
                    self.shards[unit.index()].values(range.clone())
                }
                WrittenFrom::State { .. }
                | WrittenFrom::Buffer { .. }
                | WrittenFrom::BufferState { .. } => Values::F32(values),
            };
            written.slice(elements(values))
        });
        slices.collect()
    }
}

fn elements(values: Values<'_>) -> Elements<'_> {
    match values {
        Values::F32(values) => Elements::F32(values),
        Values::F16(values) => Elements::F16(values),
        Values::BF16(values) => Elements::BF16(values),
    }
}
