use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use super::least_squares::{BoxedProblem, FitPoint};
use super::*;
use crate::computation::Recompute;
use crate::machine::{Measure, Ratio, Seconds};

const HEADER: &str = "gpus,global_batch,micro_batch,width,heads,layers,context,step_ms";

fn descended(residuals: fn(&[f64]) -> Vec<f64>, ends: [f64; 2], start: [f64; 2]) -> FitPoint {
    let problem = BoxedProblem { ends: vec![ends; 2], residuals: |x: &[f64]| Ok(residuals(x)) };
    problem.descend(problem.point(start.to_vec()).expect("residuals"), 200)
}

#[test]
fn the_valley_of_rosenbrock_ends_at_one_and_one() {
    let banana = |x: &[f64]| vec![10.0 * (x[1] - x[0] * x[0]), 1.0 - x[0]];
    let point = descended(banana, [-5.0, 5.0], [-1.2, 1.0]).at;
    assert!(point.iter().all(|it| (it - 1.0).abs() < 1e-3), "{point:?}");
}

#[test]
fn a_minimum_outside_of_the_box_is_approached_along_its_side() {
    let plane = |x: &[f64]| vec![x[0] - 3.0, x[1] - 0.25, x[0] + x[1] - 3.25];
    let point = descended(plane, [0.0, 1.0], [0.5, 0.5]).at;
    assert_eq!(point[0], 1.0);
    // With x[0] = 1, the others are x[1] - 0.25 and x[1] - 2.25, but 1 is the end.
    assert_eq!(point[1], 1.0);
}

#[test]
fn residuals_that_cannot_be_computed_end_the_way_there() {
    let residuals = |x: &[f64]| match x[0] < 0.7 {
        true => Ok(vec![x[0] - 1.0]),
        false => Err(Error::Stuck),
    };
    let problem = BoxedProblem { ends: vec![[0.0, 1.0]], residuals };
    let point = problem.descend(problem.point(vec![0.0]).expect("residuals"), 100).at;
    assert!((0.6..0.7).contains(&point[0]), "{point:?}");
}

#[test]
fn a_place_and_its_value_are_one() {
    for (range, values) in [
        (Range::new(&Ratio::UNIT), [1e-6, 0.3, 1.0]),
        (Range::new(&Seconds::UNIT), [1e-12, 4e-6, 1.0]),
    ] {
        for value in values {
            let found = range.value(range.place(value));
            assert!((found / value - 1.0).abs() < 1e-12, "{found} {value}");
        }
        assert!(range.is_at_end(range.place(1.0)) && !range.is_at_end(range.place(0.3)));
    }
}

#[test]
fn errors_are_relative_to_measurements() {
    let seconds = |seconds| Time::from_seconds(seconds).expect("a time");
    let errors = Errors::of([(seconds(1.1), seconds(1.0)), (seconds(1.5), seconds(2.0))]);
    assert!((errors.mean() - 0.175).abs() < 1e-12, "{errors:?}");
    assert!((errors.worst() - 0.25).abs() < 1e-12, "{errors:?}");
    assert_eq!(Errors::of([]).mean(), 0.0);
}

#[test]
fn a_row_of_steps_is_read_with_defaults() {
    let table = format!("{HEADER}\n4, 32, 2, 1024, 16, 24, 512, 358.5\n");
    let [(row, time)] = read_steps(&table).expect("a table").try_into().expect("one row");
    assert_eq!((row.ranks, row.shards, row.microbatches), (4, 1, 4));
    assert_eq!((row.batch.sequences, row.batch.context), (2, 512));
    assert_eq!(row.batch.recompute, Recompute::Attention);
    assert_eq!((row.batch.dtype.name(), row.model.vocabulary), ("f16", 50_257));
    assert_eq!(time, Time::from_picoseconds(358_500_000_000));
}

#[test]
fn columns_that_are_given_replace_defaults() {
    let table = format!(
        "shards,vocabulary,recompute,dtype,{HEADER}\n2,128256,unit,bf16,4,4,1,64,4,2,8,1\n"
    );
    let rows = read_steps(&table).expect("a table");
    let (row, _) = &rows[0];
    assert_eq!((row.shards, row.model.vocabulary, row.batch.dtype.name()), (2, 128_256, "bf16"));
    assert_eq!(row.batch.recompute, Recompute::Unit);
}

#[test]
fn mistakes_in_tables_have_lines() {
    let first = "2,4,1,64,4,2,8,1.5";
    let rows = [
        ("2,4,1,64,4,2,8,-1.5", "step_ms is -1.5: expected a time above 0 and below 213 days"),
        ("2,4,1,64,4,2,8,NaN", "step_ms is NaN: expected a time above 0 and below 213 days"),
        ("0,4,1,64,4,2,8,1.5", "gpus is 0: expected 1 to 1000000"),
        ("2,5,1,64,4,2,8,1.5", "gpus * micro_batch is 2, which does not divide global_batch, 5"),
        ("2,4,1,64,5,2,8,1.5", "heads is 5, which does not divide width, 64"),
        ("2,4,1,64,4,two,8,1.5", "column 6: invalid digit found in string"),
        (
            "2,4,1,64,4,2,99999999999999999999,1.5",
            "column 7: number too large to fit in target type",
        ),
    ];
    for (row, problem) in rows {
        let error = read_steps(&format!("{HEADER}\n{first}\n{row}\n")).expect_err("a mistake");
        assert_eq!(error, Error::Table { line: 3, problem: problem.into() });
    }
}

/// The last row that is allowed is not refused itself.
#[test]
fn the_layers_of_all_rows_are_bounded() {
    let row = "2,4,1,64,4,10000,8,1.5\n";
    let table = |rows: usize| read_steps(&format!("{HEADER}\n{}", row.repeat(rows)));
    assert_eq!(table(25).map(|rows| rows.len()), Ok(25));
    let problem = "the rows up to here have 260000 layers: expected at most 250000".into();
    assert_eq!(table(26), Err(Error::Table { line: 27, problem }));
}

#[test]
fn tables_without_the_columns_are_refused() {
    let cases = [
        ("", "table, line 1: no rows"),
        (HEADER, "table, line 1: no rows"),
        ("gpus,bytes\n2,8\n", "table, line 2: missing field `us`"),
        ("gpus,bytes,us,ms\n2,8,1,1\n", "table, line 2: unknown field `ms`, expected one of"),
        ("gpus,bytes,us\n2,8\n", "table, line 2: "),
    ];
    for (table, problem) in cases {
        let error = match table.starts_with("gpus,bytes") {
            true => read_all_reduces(table).expect_err("a mistake"),
            false => read_steps(table).expect_err("a mistake"),
        };
        assert!(error.to_string().starts_with(problem), "{error}");
    }
}

#[test]
fn all_reduces_are_read() {
    let rows = read_all_reduces("gpus,bytes,us\n2,1048576,44.21\n").expect("a table");
    let row = AllReduceRow { members: 2, bytes: 1 << 20 };
    assert_eq!(rows, [(row, Time::from_picoseconds(44_210_000))]);
}

#[test]
fn words_of_a_row_are_those_of_the_command_line() {
    let table = |words: &str| format!("{HEADER},recompute,dtype\n2,4,1,64,4,2,8,1.5,{words}\n");
    let read = |words: &str| read_steps(&table(words)).map(|rows| rows[0].0.batch.recompute);
    assert_eq!(read("nothing,f32"), Ok(Recompute::Nothing));
    assert_eq!(read(","), Ok(Recompute::Attention));
    let cases = [
        ("all,f32", "\"all\" cannot be recomputed: expected nothing, attention or unit"),
        (
            "unit,i64",
            "`i64` is not a valid dtype of parameters and gradients: expected f32, bf16 or f16",
        ),
    ];
    for (words, problem) in cases {
        assert_eq!(read(words), Err(Error::Table { line: 2, problem: problem.into() }));
    }
}

/// A fit predicts each row of a large table some ten times, not some thousand times.
#[test]
fn a_large_table_is_fitted_by_few_predictions() {
    let machine = Machine::bundled("a100-node").expect("bundled");
    let mut truth = machine.clone();
    truth.set("calls.start", 7e-6, "test").expect("a number");
    truth.set("links.machine.efficiency", 0.6, "test").expect("a number");
    let row = |index: usize| {
        let row = AllReduceRow { members: 2 + index % 7, bytes: 1 << (10 + index % 17) };
        let exact = row.predict(&truth).expect("a time").seconds();
        // Errors of up to 2 %, in a fixed order.
        let error = 1.0 + 0.02 * (((index * 7919) % 1000) as f64 / 500.0 - 1.0);
        (row, Time::from_seconds(exact * error).expect("a time"))
    };
    let rows: Vec<_> = (0..20_000).map(row).collect();
    let calls = AtomicUsize::new(0);
    let main = thread::current().id();
    let others = AtomicUsize::new(0);
    let predict = |machine: &Machine, row: &AllReduceRow| {
        calls.fetch_add(1, Ordering::Relaxed);
        others.fetch_add(usize::from(thread::current().id() != main), Ordering::Relaxed);
        row.predict(machine)
    };
    let measured = Measurements { table: "all.csv", rows: &rows };
    let fitted = fit(&machine, &AllReduceRow::NUMBERS, &measured, predict).expect("a fit");
    let values: Vec<f64> = fitted.numbers.iter().map(|it| it.number.value).collect();
    assert!((values[0] / 7e-6 - 1.0).abs() < 0.01, "{values:?}");
    assert!((values[1] / 0.6 - 1.0).abs() < 0.01, "{values:?}");
    assert_eq!(fitted.predicted.len(), rows.len());
    let [calls, others] = [calls, others].map(AtomicUsize::into_inner);
    assert!(calls < 60 * rows.len(), "{calls} predictions");
    if thread::available_parallelism().is_ok_and(|cores| cores.get() > 1) {
        assert!(2 * others > calls, "{others} of {calls} predictions on other threads");
    }
}

#[test]
fn a_sample_has_all_times_and_the_rows_on_which_a_number_depends() {
    // Every hundredth row is slow, and three rows alone depend on the second number.
    let time = |row: u64| {
        Time::from_picoseconds(if row.is_multiple_of(100) { 1_000_000 + row } else { row })
    };
    let predicted: Vec<Time> = (0..10_000).map(time).collect();
    let mut rare = vec![0.0; 10_000];
    [17, 4711, 9998].into_iter().for_each(|row| rare[row] = -0.5);
    let sample = sample_of(&predicted, &[vec![1.0; 10_000], rare]);
    assert!(sample.len() <= SPREAD + 2 * BY_NUMBER && sample.is_sorted());
    assert!([17, 4711, 9998].iter().all(|row| sample.contains(row)));
    let slow = sample.iter().filter(|row| row.is_multiple_of(100)).count();
    assert!((5..60).contains(&slow), "{slow}");
    let least = predicted.iter().min();
    let most = predicted.iter().max();
    let times = || sample.iter().map(|row| &predicted[*row]);
    assert_eq!((times().min(), times().max()), (least, most));
}
