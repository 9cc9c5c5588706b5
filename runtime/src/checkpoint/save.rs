//! Saving: each rank writes its part, and rank 0 makes a generation of the parts.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use hsdp_checkpoint::{
    Committed, Draft, Elements, Head, Lease, MOST_USER_BYTES, MeshShape, OptimizerHead, Place,
    Slice, Store, Training, Writer, nonce,
};
use hsdp_kernels::Values;
use hsdp_sharding::{ModelSpec, Rank};
use serde_json::Value;

use super::made::{Identity, Made};
use super::portions::{self, Source, Written};
use super::together::{Failed, Together};
use super::{Checkpoints, Content, frozen};
use crate::error::Error;
use crate::model::ShardedModel;
use crate::options::digest;
use crate::persist::checkpointed::Checkpointed;
use crate::persist::problem::Problem;
use crate::state::shard::HostShard;

/// A checkpoint that was saved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Saved {
    /// Steps that the optimizer had completed.
    pub step: u64,
    /// The checkpoint's directory on rank 0, `None` on the other ranks.
    pub path: Option<PathBuf>,
}

impl Checkpoints {
    /// Saves the model, its optimizer, and `user`, the values that the program needs to go on: a
    /// data cursor, seeds of random numbers. All of it is on the disk when the call returns. If the
    /// save fails, earlier checkpoints are as they were, and training may go on. The call waits for
    /// a save in the background that is under way. If that one has succeeded, [`poll`](Self::poll)
    /// says so; if it has failed, this call returns its error, and saves nothing: call it again.
    ///
    /// The communication may fail when the checkpoint is on the disk already. The same call then
    /// returns it, if it comes before a step or a load, with the same `user`.
    ///
    /// Collective over the model's world, between steps. `user` is the same on all ranks.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] on all ranks: it names the first rank that failed, or whose `user` or
    /// optimizer options differ or are too large ([`MOST_USER_BYTES`]). [`Error::Misuse`] within a
    /// step, while its gradients exist, inside [`ShardedModel::with_shards`], if the optimizer was
    /// made for another model, or if these checkpoints were opened by
    /// [`read_only`](Self::read_only). [`Error::Disagreement`] if ranks have updated the last step
    /// with different options. [`Error::Comm`], also if ranks are at different steps.
    pub fn save<O: Checkpointed>(
        &mut self,
        model: &ShardedModel,
        optimizer: &O,
        user: &Value,
    ) -> Result<Saved, Error> {
        self.check_writer(model, "saving")?;
        super::check(model, optimizer, "saving")?;
        model.engine.check_updated()?;
        self.settle(model)?;
        let frozen = self.frozen_part(model, saving(model).about(self.number))?;
        let saving = Saving::of(&self.store, self.number, model, optimizer, user, frozen);
        let made = self.made.as_ref().and_then(|made| made.path_of(&saving.identity()));
        let (place, head) = saving.agree(if made.is_some() { EXISTS } else { fresh() })?;
        if place.nonce() == EXISTS {
            return Ok(Saved { step: saving.step, path: made.map(Path::to_owned) });
        }
        let mut lease = self.lease.as_ref().map(|lease| lease.lock());
        let draft = saving.begin(lease.as_deref_mut(), &place)?;
        if let Err(error) = saving.write(&place) {
            draft.into_iter().for_each(Draft::discard);
            return Err(error);
        }
        Ok(Saved { step: saving.step, path: saving.commit(draft, head, &mut self.made)? })
    }
}

/// The operation of all ranks.
pub(super) fn saving(model: &ShardedModel) -> Together<'_> {
    Together::new(&model.engine.context, "saving", model.committed_steps())
}

/// The nonce of rank 0 where the generation is there already.
const EXISTS: u64 = 0;

/// The nonce of a new generation.
pub(super) fn fresh() -> u64 {
    nonce().max(EXISTS + 1)
}

/// A save that is under way.
pub(super) struct Saving<'a, O> {
    store: &'a Store,
    /// Number of the checkpoints.
    number: u32,
    model: &'a ShardedModel,
    optimizer: &'a O,
    user: &'a Value,
    step: u64,
    /// This rank's part of the digest of the frozen parameters, if these are left out.
    frozen: Option<u64>,
    of_optimizer: OptimizerHead,
    /// `user`, the optimizer's options and those with which it was made, as JSON.
    texts: [String; 3],
}

impl<'a, O: Checkpointed> Saving<'a, O> {
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

    pub(super) fn together(&self) -> Together<'_> {
        saving(self.model).about(self.number)
    }

    fn identity(&self) -> Identity {
        let (model, loads) = (self.model.id().clone(), self.model.engine.state().loads);
        Identity { model, loads, step: self.step, digests: self.digests() }
    }

    fn digests(&self) -> [u64; 3] {
        self.texts.each_ref().map(|text| digest::of_text(text))
    }

    /// Rank 0 makes the directory.
    fn begin<'l>(
        &self,
        lease: Option<&'l mut Lease>,
        place: &Place,
    ) -> Result<Option<Draft<'l>>, Error> {
        let begin = |lease: &'l mut Lease| lease.begin_at(place.clone());
        self.together().run(|| Ok(lease.map(begin).transpose()?))
    }

    /// All ranks write their parts.
    fn write(&self, place: &Place) -> Result<(), Error> {
        self.together().run(|| {
            let contents = Contents::of(self.model, self.optimizer, self.content())?;
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
    pub(super) fn agree(&self, nonce: u64) -> Result<(Place, Head), Error> {
        let (engine, [user, options, made_with]) = (&self.model.engine, self.digests());
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
    fn commit(
        &self,
        draft: Option<Draft<'_>>,
        head: Head,
        made: &mut Option<Made>,
    ) -> Result<Option<PathBuf>, Error> {
        let (writers, mut path) = (self.model.world().size(), None);
        let agreed = self.together().run(|| {
            path = draft.map(|draft| draft.commit(head, writers)).transpose()?.map(told);
            Ok(())
        });
        if agreed.is_err() {
            *made = path.take().map(|path| Made { identity: self.identity(), path });
        }
        agreed.map(|()| path)
    }

    fn head(&self, weight_hint: u64, frozen_digest: Option<u64>) -> Head {
        let (state, mesh) = (self.model.engine.state(), self.model.plan().mesh());
        let [replicate, shard] = [mesh.replicate_size(), mesh.shard_size()].map(|it| it as u64);
        let (loss_scale, applied) = (state.loss_scale.saved(), state.applied);
        Head {
            step: self.step,
            mesh: MeshShape { replicate, shard },
            training: Training { loss_scale, weight_hint, applied_steps: Some(applied) },
            optimizer: Some(self.of_optimizer.clone()),
            user: self.user.clone(),
            frozen_digest,
            settings: settings_of(self.model.plan().spec()),
        }
    }
}

fn settings_of(spec: &ModelSpec) -> BTreeMap<String, String> {
    spec.settings().map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
}

/// Returns the checkpoint's directory. Work that failed after the commit is logged, and is not a
/// failure of the save.
pub(super) fn told(committed: Committed) -> PathBuf {
    for error in committed.left_undone {
        hsdp_warnings::warn!(%error, "the checkpoint is saved; the part that failed is tried again with \
                                the next");
    }
    committed.path
}

/// The elements that this rank writes, in place where possible.
struct Contents<'a> {
    written: Vec<Written>,
    /// By unit.
    shards: Vec<HostShard>,
    /// By `written`; empty for parameters.
    states: Vec<Cow<'a, [f32]>>,
}

impl<'a> Contents<'a> {
    fn of<O: Checkpointed>(
        model: &ShardedModel,
        optimizer: &'a O,
        content: Content,
    ) -> Result<Self, Error> {
        let context = &model.engine.context;
        let shards = model.engine.state().shards.clone();
        let written = portions::to_write(context, &optimizer.tensors(), content);
        let state = |written: &Written| match &written.source {
            Source::Shard { .. } => Ok(Cow::Borrowed(&[][..])),
            Source::State { kind, parameter, range } => {
                let state = optimizer.state(model, (kind, *parameter), range.clone())?;
                Ok(state.expect("an optimizer has the tensors that it names"))
            }
        };
        let states = written.iter().map(state).collect::<Result<_, Error>>()?;
        let shards = shards.iter().map(|shard| shard.kept(context)).collect::<Result<_, _>>()?;
        Ok(Self { written, shards, states })
    }

    fn slices(&self) -> Vec<Slice<'_>> {
        let slices = self.written.iter().zip(&self.states).map(|(written, state)| {
            let values = match &written.source {
                Source::Shard { unit, range } => self.shards[unit.index()].values(range.clone()),
                Source::State { .. } => Values::F32(state),
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
