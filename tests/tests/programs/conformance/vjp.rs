//! The kind `vjp` of the conformance runner: corners that the cases in `cases` do not have,
//! failures that must be seen, and cases that make no sense.

use std::fs;

use hsdp_tests::conformance::{Case, MOST_RANKS, Verdict, VjpCase, Worst};
use serde_json::{Value, json};

fn read(case: &Value) -> Result<Case, String> {
    let folder = tempfile::tempdir().expect("a temporary folder");
    fs::write(folder.path().join("case.json"), case.to_string()).expect("written");
    Case::read(folder.path()).map_err(|error| error.to_string())
}

fn run(case: &Value) -> Verdict {
    read(case).expect("it makes sense").run()
}

/// A case with a name that no test reads: inputs, cotangents, outputs, gradients.
fn case(op: &str, reduce: Option<&str>, values: [Value; 4]) -> Value {
    let [inputs, cotangents, outputs, gradients] = values;
    json!({
        "kind": "vjp", "name": format!("{op}-by-hand"), "op": op, "reduce": reduce,
        "world": inputs.as_array().map_or(0, Vec::len), "root": 1, "destination": null,
        "inputs": inputs, "cotangents": cotangents,
        "expected_outputs": outputs, "expected_input_gradients": gradients,
    })
}

fn with(mut case: Value, field: &str, value: Value) -> Value {
    case[field] = value;
    case
}

/// Three ranks with ties: 2 and 5 of the first elements, all of the second.
fn reduced_to_1(reduce: &str, output: [f64; 2], gradients: [[f64; 2]; 3]) -> Value {
    let inputs = json!([[2.0, -1.0], [5.0, -1.0], [2.0, -1.0]]);
    let cotangents = json!([null, [6.0, 3.0], null]);
    let outputs = json!([null, output, null]);
    case("reduce", Some(reduce), [inputs, cotangents, outputs, json!(gradients)])
}

fn assert_exact(case: &Value) {
    match run(case) {
        Verdict::Passed(Worst::OfBound { ratio, .. }) => assert_eq!(ratio, 0.0, "{case}"),
        Verdict::Passed(Worst::Exact(0)) => {}
        other => panic!("{other}: {case}"),
    }
}

#[test]
fn roots_that_reduce_in_every_way() {
    let row = |first: f64, second: f64| [first, second];
    assert_exact(&reduced_to_1("sum", [9.0, -3.0], [row(6.0, 3.0); 3]));
    assert_exact(&reduced_to_1("avg", [3.0, -1.0], [row(2.0, 1.0); 3]));
    let of_product = [row(60.0, 3.0), row(24.0, 3.0), row(60.0, 3.0)];
    assert_exact(&reduced_to_1("prod", [20.0, -1.0], of_product));
    assert_exact(&reduced_to_1("min", [2.0, -1.0], [row(3.0, 1.0), row(0.0, 1.0), row(3.0, 1.0)]));
    assert_exact(&reduced_to_1("max", [5.0, -1.0], [row(0.0, 1.0), row(6.0, 1.0), row(0.0, 1.0)]));
}

#[test]
fn parts_whose_extreme_several_hold() {
    let inputs = json!([[1.0, 7.0], [1.0, 8.0]]);
    let cotangents = json!([[4.0], [6.0]]);
    let outputs = json!([[1.0], [7.0]]);
    let gradients = json!([[2.0, 6.0], [2.0, 0.0]]);
    assert_exact(&case("reduce_scatter", Some("min"), [inputs, cotangents, outputs, gradients]));
}

#[test]
fn a_permutation_in_which_some_send_nothing() {
    let inputs = json!([[1.0], [2.0], [3.0]]);
    let cotangents = json!([[10.0], [20.0], [30.0]]);
    let outputs = json!([[3.0], [1.0], [0.0]]);
    let gradients = json!([[20.0], [0.0], [10.0]]);
    let permute = case("permute", None, [inputs, cotangents, outputs, gradients]);
    assert_exact(&with(permute, "destination", json!([1, null, 0])));
}

/// On one rank every operation is the identity, except for a permutation without a destination.
#[test]
fn one_rank() {
    let reduces = ["sum", "avg", "prod", "min", "max"];
    let ops = ["all_gather", "all_to_all", "broadcast", "gather", "scatter", "permute"];
    let all = ops.map(|op| (op, None)).into_iter().chain(
        ["all_reduce", "reduce_scatter", "reduce"]
            .into_iter()
            .flat_map(|op| reduces.map(|reduce| (op, Some(reduce)))),
    );
    for (op, reduce) in all {
        let [x, g] = [json!([[0.0, -2.5, 3.0]]), json!([[1.0, 2.0, -7.0]])];
        let one = case(op, reduce, [x.clone(), g.clone(), x, g]);
        let one = with(with(one, "root", json!(0)), "destination", json!([0]));
        assert_exact(&one);
        // Nothing is as well moved as something.
        let nothing = json!([[]]);
        let fields = ["inputs", "cotangents", "expected_outputs", "expected_input_gradients"];
        assert_exact(&fields.into_iter().fold(one, |one, field| with(one, field, nothing.clone())));
    }
    let [x, zero] = [json!([[5.0]]), json!([[0.0]])];
    let permute = case("permute", None, [x.clone(), x, zero.clone(), zero]);
    assert_exact(&with(permute, "destination", json!([null])));
}

#[test]
fn eight_ranks() {
    let each = |value: &dyn Fn(usize) -> Value| Value::Array((0..8).map(value).collect());
    let inputs = each(&|rank| json!([rank + 1]));
    let cotangents = each(&|rank| json!([2 * rank]));
    let [outputs, gradients] = [json!([36]), json!([56])].map(|all| each(&|_| all.clone()));
    assert_exact(&case(
        "all_reduce",
        Some("sum"),
        [inputs.clone(), cotangents, outputs, gradients],
    ));

    let all: Vec<usize> = (1..=8).collect();
    let ones = each(&|_| json!([1, 1, 1, 1, 1, 1, 1, 1]));
    let [gathered, eights] = [each(&|_| json!(all)), each(&|_| json!([8]))];
    assert_exact(&case("all_gather", None, [inputs, ones, gathered, eights]));
}

fn product() -> Value {
    let inputs = json!([[2.0, 3.0], [5.0, 7.0]]);
    let cotangents = json!([[1.0, -4.0], [1.0, 4.5]]);
    let outputs = json!([[10.0, 21.0], [10.0, 21.0]]);
    case(
        "all_reduce",
        Some("prod"),
        [inputs, cotangents, outputs, json!([[10.0, 3.5], [4.0, 1.5]])],
    )
}

/// The bound is that of what contributes, not of what is left of it: 8.5 times 7 in the last
/// element of rank 0, of which 3.5 is left.
#[test]
fn the_bound_is_of_the_absolute_contributions() {
    let off_by = |ratio: f64| {
        let of_rank_0 = json!([10.0, 3.5 + ratio * 1e-12 * 8.5 * 7.0]);
        with(product(), "expected_input_gradients", json!([of_rank_0, [4.0, 1.5]]))
    };
    let near = run(&off_by(0.5)).to_string();
    assert!(near.starts_with("worst 0.5") || near.starts_with("worst 0.49"), "{near}");
    assert!(near.ends_with(" of bound (rank 0, gradient[1])"), "{near}");
    let far = run(&off_by(1.1));
    let Verdict::Failed(far) = far else { panic!("{far}") };
    assert!(far.starts_with("rank 0, gradient[1]: got 3.5, expected 3.5"), "{far}");
    assert!(far.ends_with(" times the bound (1 of 8 wrong)"), "{far}");
}

#[test]
fn what_is_wrong_is_named() {
    let wrong_output = with(product(), "expected_outputs", json!([[10.0, 21.0], [10.0, 22.0]]));
    let said = run(&wrong_output).to_string();
    assert!(said.starts_with("rank 1, output[1]: got 21, expected 22"), "{said}");

    let zero = json!([[0.0], [0.0]]);
    let off_zero = [zero.clone(), zero.clone(), json!([[0.0], [1e-300]]), zero];
    let said = run(&case("all_reduce", Some("sum"), off_zero)).to_string();
    assert!(said.starts_with("rank 1, output[0]: got 0, expected 0.000"), "{said}");
}

#[test]
fn more_ranks_than_there_is_room_for_are_skipped() {
    let ranks = MOST_RANKS + 1;
    let ones = Value::Array(vec![json!([1.0]); ranks]);
    let many = case("permute", None, [ones.clone(), ones.clone(), ones.clone(), ones]);
    let itself: Vec<usize> = (0..ranks).collect();
    let skipped = run(&with(many, "destination", json!(itself)));
    let expected = format!("{ranks} ranks: at most {MOST_RANKS} run as threads of one process");
    assert_eq!(skipped, Verdict::Skipped(expected));
}

#[test]
fn what_makes_no_sense_is_refused_with_its_numbers() {
    let gather = || {
        let inputs = json!([[1.0], [2.0]]);
        let ones = json!([null, [1.0, 1.0]]);
        case("gather", None, [inputs, ones, json!([null, [1.0, 2.0]]), json!([[1.0], [1.0]])])
    };
    let scatter = || with(product(), "op", json!("scatter"));
    let permute = |to: Value| with(with(product(), "op", json!("permute")), "destination", to);
    let rows = [
        (with(product(), "op", json!("dance")), "op `dance`: expected all_reduce, "),
        (
            with(product(), "reduce", json!("xor")),
            "reduce `xor` of op `all_reduce`: expected sum, ",
        ),
        (
            with(product(), "reduce", json!(null)),
            "reduce `null` of op `all_reduce`: expected sum, ",
        ),
        (with(product(), "world", json!(0)), "world is 0: the least is 1"),
        (with(product(), "world", json!(3)), "inputs are of 2 ranks, the world has 3"),
        (with(product(), "world", json!(-1)), "invalid value: integer `-1`"),
        (
            with(product(), "cotangents", json!([[1.0, 1.0]])),
            "cotangents are of 1 ranks, the world has 2",
        ),
        (
            with(product(), "inputs", json!([[1.0], [1.0, 2.0]])),
            "cotangents[0] is 2 elements: expected 1 elements",
        ),
        (
            with(product(), "inputs", json!([[1.0, 2.0], [1.0]])),
            "inputs[1] is 1 elements: expected 2 elements",
        ),
        (
            with(product(), "cotangents", json!([[1.0, 2.0], null])),
            "cotangents[1] is null: expected 2 elements",
        ),
        (
            with(product(), "expected_input_gradients", json!([[1.0, 2.0], []])),
            "expected_input_gradients[1] is 0 elements: expected 2 elements",
        ),
        (with(product(), "inputs", json!([[1.0, "2"], [1.0, 2.0]])), "invalid type: string \"2\""),
        (
            with(gather(), "expected_outputs", json!([[1.0, 2.0], [1.0, 2.0]])),
            "expected_outputs[0] is 2 elements: expected null",
        ),
        (with(gather(), "root", json!(null)), "root is null: op `gather` has one"),
        (with(gather(), "root", json!(2)), "root is rank 2, the world has 2"),
        (
            with(scatter(), "inputs", json!([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])),
            "inputs have 3 elements: op `scatter` deals them to 2 ranks",
        ),
        (permute(json!(null)), "destination is null: op `permute` has one for each rank"),
        (permute(json!([0])), "destination has 1 ranks, the world has 2"),
        (permute(json!([0, 2])), "destination[1] is rank 2, the world has 2"),
        (permute(json!([0, 0])), "destination: ranks 0 and 1 both send to 0"),
    ];
    for (broken, what) in rows {
        let said = read(&broken).expect_err("it makes no sense");
        assert!(said.contains(&format!("case.json: {what}")), "{said}");
        assert_eq!(said.lines().count(), 1, "{said}");
    }
    let mut lacking = product();
    let _ = lacking.as_object_mut().expect("an object").remove("cotangents");
    let said = read(&lacking).expect_err("it makes no sense");
    assert!(said.contains("missing field `cotangents`"), "{said}");
}

#[test]
fn a_case_says_what_it_needs() {
    let case = read(&product()).expect("it makes sense");
    assert_eq!((case.name(), case.world_size()), ("all_reduce-by-hand", 2));
    let Case::Vjp(vjp) = case else { panic!("of another kind") };
    assert_eq!(VjpCase::world_size(&vjp), 2);
}
