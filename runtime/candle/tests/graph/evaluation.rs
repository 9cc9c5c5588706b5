//! Evaluations of models in candle: the one gather of each unit, and no graph.

use hsdp::{Error as RuntimeError, Mesh, World};
use hsdp_candle::{Error, Pass, UnitsExt};

use crate::common::{self, input, layer, layers, loss_of_layers, sharded, step, words};

#[test]
fn units_are_gathered_once_and_nothing_has_a_history() {
    let events = common::results(2, |world| -> Result<_, Error> {
        let mut model = sharded(world, layers(3, 4), mesh());
        model.record_events();
        let mut evaluation = model.evaluation()?;
        let pass = Pass::new(evaluation.batch()?)?;
        let output = pass.unit("layer.0", &input(0, 3, 4), |p, x| layer(p, 0, x))?;
        assert!(!output.track_op());
        let output = pass.recomputed("layer.1", &output, |p, x| layer(p, 1, x))?;
        assert!(!output.track_op());
        pass.unit("layer.2", &output, |p, x| layer(p, 2, x))?;
        pass.finish()?;
        evaluation.finish()?;
        Ok(model.take_events())
    });
    for events in events {
        let words = words(&events.expect("an evaluation"));
        assert_eq!(words, ["gather 0 forward", "gather 1 forward", "gather 2 forward"]);
    }
}

/// The rows of a table leave the unit as a view of a parameter, which is freed.
#[test]
fn a_view_of_a_parameter_may_be_the_output() {
    let table = hsdp::Unit::new("table").param(hsdp::Param::new("table.rows", [4, 4]));
    let layer_unit = common::layer_unit(0, 4);
    let spec = hsdp::ModelSpec::new().unit(table).unit(layer_unit);
    let outputs = common::results(2, |world| -> Result<_, Error> {
        let mut model = sharded(world, spec.clone(), mesh());
        let mut evaluation = model.evaluation()?;
        let pass = Pass::new(evaluation.batch()?)?;
        let rows =
            pass.unit("table", &input(0, 3, 4), |p, _| p.get("table.rows")?.narrow(0, 1, 3))?;
        let output = pass.unit("layer.0", &rows, |p, x| layer(p, 0, x))?.to_vec2::<f32>()?;
        pass.finish()?;
        evaluation.finish()?;
        Ok((output, rows.to_vec2::<f32>()?))
    });
    for output in outputs {
        let (_, rows) = output.expect("an evaluation");
        let all = common::values(&hsdp::Param::new("table.rows", [4, 4]));
        assert_eq!(rows.concat(), all[4..]);
    }
}

#[test]
fn an_evaluation_has_no_backward() {
    let mut model = sharded(World::single(), layers(1, 4), Mesh::new(1, 1).expect("one rank"));
    let mut evaluation = model.evaluation().expect("between steps");
    let pass = Pass::new(evaluation.batch().expect("a batch")).expect("a pass");
    let loss = loss_of_layers(&pass, 1, &input(0, 3, 4)).expect("a forward");
    let error = pass.backward(&loss, 1).expect_err("there is none");
    assert!(matches!(error, Error::Runtime(RuntimeError::Misuse { .. })), "{error}");
    drop(evaluation);
    let _ = step(&mut model, |pass| loss_of_layers(pass, 1, &input(0, 3, 4))).expect("a step");
}

fn mesh() -> Mesh {
    Mesh::new(1, 2).expect("two shards")
}
