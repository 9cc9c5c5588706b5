//! Updates that are refused before anything changes.

use hsdp::{
    AdamW, AdamWOptions, Error, Lion, Mesh, ModelOptions, ModelSpec, Muon, MuonOptions, Optimizer,
    Param, Selected, Sgd, SgdOptions, ShardedModel, Unit, World,
};
use hsdp_tests::support::springs;
use hsdp_tests::support::worlds::{mesh, on_ranks};

use crate::model::{LION, Recipe, gradients, is_matrix, spec};

fn model(spec: ModelSpec) -> ShardedModel {
    let options = ModelOptions::on(Mesh::SINGLE);
    springs::model_of(World::single(), &spec, &options).expect("a model")
}

/// The error of an update, which changes nothing. A later update is made.
fn refused(
    act: impl FnOnce(&mut ShardedModel, hsdp::Gradients) -> Result<hsdp::Update, Error>,
) -> String {
    let mut model = model(spec(Recipe::Muon));
    let before = model.full_parameters().expect("parameters");
    let of_step = gradients(&mut model, 0).expect("gradients");
    let told = act(&mut model, of_step).expect_err("it is refused").to_string();
    assert_eq!(model.full_parameters().expect("parameters"), before);
    assert_eq!(model.committed_steps(), 0);
    let mut sgd = Sgd::new(&model, SgdOptions::default());
    let of_step = gradients(&mut model, 1).expect("gradients");
    sgd.step(&mut model, of_step).expect("an update");
    assert_ne!(model.full_parameters().expect("parameters"), before);
    told
}

fn is_bias(param: &Param) -> bool {
    param.name.ends_with("bias")
}

#[test]
fn each_parameter_has_one_optimizer() {
    let _turn = crate::beside_others();
    let told = refused(|model, gradients| {
        let mut muon = Muon::new(model, MuonOptions::default());
        let mut adamw = AdamW::new(model, AdamWOptions::default());
        model.update_by(gradients, [(&mut muon, &is_matrix), (&mut adamw, &is_bias)])
    });
    assert_eq!(told, "parameter `second.norm`: no optimizer of the update selects it");
    let told = refused(|model, gradients| {
        let mut lion = Lion::new(model, LION);
        let mut adamw = AdamW::new(model, AdamWOptions::default());
        model.update_by(gradients, [(&mut lion, &|_| true), (&mut adamw, &is_bias)])
    });
    assert_eq!(told, "parameter `first.bias`: optimizers 0 and 1 of the update both select it");
}

#[test]
fn muon_needs_matrices() {
    let _turn = crate::beside_others();
    let told =
        refused(|model, gradients| Muon::new(model, MuonOptions::default()).step(model, gradients));
    assert!(told.contains("`first.bias`"), "{told}");
}

#[test]
fn eight_bit_state_needs_blocks() {
    let _turn = crate::beside_others();
    let told = refused(|model, gradients| {
        AdamW::with_eight_bit_state(model, AdamWOptions::default()).step(model, gradients)
    });
    let expected = "parameter `first.weight`: adamw8bit keeps state in blocks of 256 elements, and shards are cut within them: declare the \
                    parameter with `blocks(256)`";
    assert_eq!(told, expected);
}

#[test]
fn an_optimizer_keeps_its_parameters() {
    let _turn = crate::beside_others();
    let mut model = model(spec(Recipe::Sgd));
    let mut lion = Lion::new(&model, LION);
    let mut adamw = AdamW::new(&model, AdamWOptions::default());
    let of_step = gradients(&mut model, 0).expect("gradients");
    let both: [Selected<'_>; 2] = [(&mut lion, &is_matrix), (&mut adamw, &|it| !is_matrix(it))];
    model.update_by(of_step, both).expect("an update");
    let of_step = gradients(&mut model, 1).expect("gradients");
    let told = lion.step(&mut model, of_step).expect_err("it is refused").to_string();
    let expected = "parameter `first.bias`: lion has no state of it, because it did not update it in its first update";
    assert_eq!(told, expected);
}

/// An optimizer of another model is refused, also beside one of this model, and neither is counted.
#[test]
fn an_optimizer_of_another_model_is_refused() {
    let _turn = crate::beside_others();
    let other = model(ModelSpec::new().unit(Unit::new("other").param(Param::new("w", [4]))));
    let adamw = || AdamW::new(&other, AdamWOptions::default());
    let beside = refused(|model, gradients| {
        let mut lion = Lion::new(model, LION);
        model.update_by(gradients, [(&mut lion, &is_matrix), (&mut adamw(), &|it| !is_matrix(it))])
    });
    let alone = refused(|model, gradients| adamw().step(model, gradients));
    let sgd = refused(|model, it| Sgd::new(&other, SgdOptions::default()).step(model, it));
    for told in [beside, alone, sgd] {
        let expected = "optimizer step on rank 0, step 0: the optimizer was made for another model";
        assert_eq!(told, expected);
    }
}

/// The results of four ranks, of which rank 1 has options that are refused, and of their next step
/// by other options.
fn with_one_refused(sizes: [usize; 2]) -> Vec<[Result<hsdp::Update, Error>; 2]> {
    on_ranks(4, |world| {
        let options = ModelOptions::on(mesh(sizes[0], sizes[1]));
        let mut model = ShardedModel::new(world, spec(Recipe::Muon), options, springs::initial)?;
        let momentum = if model.rank().index() == 1 { 1.0 } else { 0.9 };
        let mut muon = Muon::new(&model, MuonOptions { momentum, ..MuonOptions::default() });
        let mut adamw = AdamW::new(&model, AdamWOptions::default());
        let of_step = gradients(&mut model, 0)?;
        let first =
            model.update_by(of_step, [(&mut muon, &is_matrix), (&mut adamw, &|it| !is_matrix(it))]);
        let mut sgd = Sgd::new(&model, SgdOptions::default());
        let next = gradients(&mut model, 1);
        Ok([first, next.and_then(|gradients| sgd.step(&mut model, gradients))])
    })
}

/// The other ranks of its shard group do not wait for it, and change nothing.
#[test]
fn a_rank_that_is_refused_tells_the_others() {
    let _turn = crate::beside_others();
    for (rank, [first, next]) in with_one_refused([1, 4]).into_iter().enumerate() {
        let told = first.expect_err("there is no update").to_string();
        assert!(told.contains("muon momentum 1.0: it must be"), "rank {rank}: {told}");
        assert!(rank == 1 || told.contains("rank 1"), "rank {rank}: {told}");
        next.expect("all ranks go on as they were");
    }
}

/// Ranks of another shard group may have updated: then no rank goes on. Otherwise all go on.
#[test]
fn a_group_that_has_updated_alone_does_not_go_on() {
    let _turn = crate::beside_others();
    let ends = with_one_refused([2, 2]);
    assert!(ends[0][0].is_err() && ends[1][0].is_err(), "their group is refused: {ends:?}");
    let none_updated = ends.iter().all(|[first, _]| first.is_err());
    assert!(ends.iter().all(|[_, next]| next.is_ok() == none_updated), "{ends:?}");
}
