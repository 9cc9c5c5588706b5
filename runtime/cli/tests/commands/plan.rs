//! `hsdp plan`: its numbers are the library's, its models have the published sizes, and its errors
//! are one line.

use std::fs;
use std::time::{Duration, Instant};

use hsdp_sharding::{
    ByteCount, DType, Flow, Mesh, ModelSpec, Offload, Param, Phase, Plan, PlanOptions, Rank, State,
    StateOver, Traffic, Unit, UnitLayout,
};
use serde_json::{Value, json};

use crate::folder::{Folder, json};
use crate::program::hsdp;

fn planned(arguments: &[&str]) -> Value {
    json(&[&["plan"], arguments].concat())
}

/// Writes a model to `DIR/model.json`, and returns the error of its plan.
fn refused(model: &str, arguments: &[&str]) -> String {
    let folder = Folder::new();
    folder.refused(&[&["plan", &*folder.file("model.json", model)], arguments].concat())
}

#[test]
fn bundled_models_have_the_published_sizes() {
    for (name, parameters, units) in [
        ("gpt2-small", 124_439_808_u64, 13),
        ("llama3-8b", 8_030_261_248, 34),
        ("llama3-70b", 70_553_706_496, 82),
    ] {
        let plan = planned(&[name, "--mesh", "1x8"]);
        assert_eq!(plan["parameters"], parameters);
        assert_eq!(plan["units"].as_array().map(Vec::len), Some(units), "{name}");
    }
}

/// A plan that went through elements, and not through parameters, would take minutes.
#[test]
fn a_large_model_on_many_ranks_is_planned_in_seconds_whatever_else_runs() {
    let began = Instant::now();
    planned(&["llama3-70b", "--mesh", "2x64"]);
    let took = began.elapsed();
    assert!(took < Duration::from_secs(10), "{took:?}");
}

const MODEL: &str = r#"{"units": [
    {"name": "one", "params": [{"name": "w", "shape": [50, 7]}, {"name": "b", "shape": [7]}]},
    {"name": "two", "keep": true, "params": [
        {"name": "v", "shape": [33, 5], "rows": 4}, {"name": "f", "shape": [], "frozen": true}]}],
    "ties": [{"name": "head", "to": "w"}]}"#;

#[test]
fn a_step_is_printed_in_words() {
    let folder = Folder::new();
    let file = folder.file("model.json", MODEL);
    let arguments = ["plan", &*file, "--mesh", "2x2", "--microbatches", "5", "--program"];
    let (code, text, told) = hsdp(&arguments);
    assert_eq!((code, &*told), (Some(0), ""));
    let microbatch = "g0 g1 (g0) u0 g0' (g1) u1 <weights> r1 (g0') u0' r0";
    let last = "g0 g1 (g0) u0 g0' (g1) u1 (r1) r1 a1 (g0') u0' (r0) r0 a0";
    let middle = "g0 g1 (g0) u0 g0' (g1) u1 (r1) r1 (g0') u0' (r0) r0";
    let expected = format!(
        "opening: <headers>\nmicrobatch 0: {microbatch}\nmicrobatches 1 to 3: {middle}\n\
         microbatch 4: {last}\nfinish: (a1) (a0) <statement>\n\nunits: 0 one, 1 two\n"
    );
    assert!(text.starts_with(&expected), "{text}");
    assert!(text.contains("r1 reduce-scatters them"), "{text}");
}

/// The same model, built with the library.
fn same() -> ModelSpec {
    let one = Unit::new("one").param(Param::new("w", [50, 7])).param(Param::new("b", [7]));
    let two = Unit::new("two")
        .param(Param::new("v", [33, 5]).rows(4))
        .param(Param::new("f", []).frozen())
        .keep();
    ModelSpec::new().unit(one).unit(two).tie("head", "w")
}

fn flow(flow: Flow) -> Value {
    json!({ "calls": flow.calls, "bytes": flow.bytes.get() })
}

fn flows(traffic: &Traffic) -> Value {
    let mut all = json!({
        "all_gather": flow(traffic.all_gather), "reduce_scatter": flow(traffic.reduce_scatter),
        "all_reduce": flow(traffic.all_reduce), "total": flow(traffic.total()),
    });
    let rare = [
        ("scatter_sums", traffic.scatter_sums),
        ("gather_slices", traffic.gather_slices),
        ("statistics", traffic.statistics),
        ("update", traffic.update),
    ];
    for (name, rare) in rare {
        if rare != Flow::NONE {
            all[name] = flow(rare);
        }
    }
    all
}

/// Plans a model on a mesh of 3 x 2.
fn planned_file(model: &str, optimizer: &str) -> Value {
    planned_over("shards", model, optimizer)
}

fn planned_over(state: &str, model: &str, optimizer: &str) -> Value {
    let folder = Folder::new();
    let options = ["--mesh", "3x2", "--microbatches", "4", "--optimizer", optimizer];
    let state = ["--state-over", state];
    planned(&[&[&*folder.file("model.json", model)], &options[..], &state].concat())
}

#[test]
fn a_file_gives_the_numbers_of_the_library() {
    let said = planned_file(MODEL, "adamw");
    assert_says(&said, same());
    assert_eq!(said["memory"]["places"]["host"].get("update"), None, "no matrices are exchanged");
}

#[test]
fn a_unit_of_a_file_computes_in_its_own_dtype() {
    let file = MODEL.replace("\"keep\": true", "\"keep\": true, \"compute_dtype\": \"bf16\"");
    let said = planned_file(&file, "adamw");
    let mut units = same().units().to_vec();
    units[1].compute_dtype = Some(DType::BF16);
    let spec = units.into_iter().fold(ModelSpec::new(), ModelSpec::unit).tie("head", "w");
    let plan = assert_says(&said, spec);
    assert_eq!(said["memory"]["places"]["host"]["gather_input"], plan.memory().gather_input.get());
    let dtypes = [0, 1].map(|unit| said["units"][unit]["compute_dtype"].clone());
    assert_eq!(dtypes, ["f32", "bf16"].map(Value::from));
    let told = refused(&file.replace("bf16", "i64"), &["--mesh", "1x2"]);
    let expected = "hsdp: DIR/model.json: unit `two` computes in i64: expected f32, f16 or bf16";
    assert_eq!(told, expected);
}

#[test]
fn the_update_of_whole_matrices_has_the_numbers_of_the_library() {
    let said = planned_file(MODEL, "muon");
    let state = |param: &Param| match param.shape.len() {
        2 => State::Muon,
        _ => State::Elements(2),
    };
    let plan = assert_says(&said, same().updated_by(state));
    let host = &said["memory"]["places"]["host"];
    assert_eq!(host["update"], plan.memory().update.get());
    assert_eq!(said["optimizer"], "muon");
    // An embedding is left to AdamW, and a declared view is a matrix.
    let tables = MODEL.replace("\"v\"", "\"v_embed\"").replace("[50, 7]", "[350]");
    let said = planned_file(&tables, "muon");
    assert_eq!(said["traffic"]["rank"].get("update"), None);
    let viewed = tables.replace("[350]", "[350], \"matrices\": [2, 25, 7]");
    let said = planned_file(&viewed, "muon");
    assert_eq!(said["traffic"]["rank"]["update"]["calls"], 2);
}

#[test]
fn the_sums_of_adafactor_have_the_numbers_of_the_library() {
    let said = planned_file(MODEL, "adafactor");
    let plan = assert_says(&said, same().updated_by(|_| State::Factored));
    let host = &said["memory"]["places"]["host"];
    assert_eq!(host["update"], plan.memory().update.get());
    assert!(plan.memory().update > ByteCount::ZERO, "the sums take memory");
    // The sums of 50 rows and 7 columns, and of 33 rows and 5 columns, are 98 values, and those of
    // the parameters 3. Of six ranks the first has 17 and 1.
    let expected = 8 * (5 * 17 + 81 + 5 + 2);
    assert_eq!(said["traffic"]["rank"]["update"], json!({ "calls": 2, "bytes": expected }));
    assert_eq!(plan.update(Rank::new(0)).summed.bytes, ByteCount(expected));
}

#[test]
fn eight_bit_state_has_two_bytes_an_element_and_cuts_between_blocks() {
    let said = planned_file(MODEL, "adamw8bit");
    let one = Unit::new("one")
        .param(Param::new("w", [50, 7]).blocks(256))
        .param(Param::new("b", [7]).blocks(256));
    let two = Unit::new("two")
        .param(Param::new("v", [33, 5]).blocks(256))
        .param(Param::new("f", []).frozen())
        .keep();
    let spec = ModelSpec::new().unit(one).unit(two).tie("head", "w");
    assert_says(&said, spec.updated_by(|_| State::EightBit { block: 256 }));
    // The first shard has 256 elements of `w`, its first block, and all 165 elements of `v`.
    let expected = (2 * 256 + 8) + (2 * 192 + 8);
    assert_eq!(said["memory"]["places"]["host"]["optimizer"], expected);
    let in_file = MODEL.replace("\"rows\": 4", "\"blocks\": 64");
    let said = planned_file(&in_file, "adamw");
    let plan = said["units"][1]["padding"].clone();
    let unit = Unit::new("two")
        .param(Param::new("v", [33, 5]).blocks(64))
        .param(Param::new("f", []).frozen());
    let layout = UnitLayout::new(&unit, 2).expect("a layout");
    assert_eq!(plan, layout.padding().get());
}

#[test]
fn a_batch_norm_of_a_file_has_its_parameters_and_statistics() {
    let model = r#"{"units": [
        {"name": "one", "params": [{"name": "w", "shape": [50, 7]}],
         "batch_norms": [{"name": "bn1", "channels": 9}, {"name": "bn2", "channels": 7}]},
        {"name": "two", "params": [{"name": "v", "shape": [33]}]}]}"#;
    let one = Unit::new("one").param(Param::new("w", [50, 7]));
    let two = Unit::new("two").param(Param::new("v", [33]));
    let spec = ModelSpec::new().unit(one.batch_norm("bn1", 9).batch_norm("bn2", 7)).unit(two);
    let said = planned_file(model, "adamw");
    let plan = assert_says(&said, spec);
    let statistics = plan.traffic(Rank::new(0), 4).statistics;
    assert_eq!(statistics.calls, 4 * 2 * 2);
    assert_eq!(said["traffic"]["rank"]["statistics"]["calls"], statistics.calls);
    let none = r#"{"units": [{"name": "one", "params": [{"name": "w", "shape": [5]}],
        "batch_norms": [{"name": "bn", "channels": 0}]}]}"#;
    let told = refused(none, &["--mesh", "1x2"]);
    assert!(told.contains("bn"), "{told}");
}

/// Compares a plan of 4 microbatches on a mesh of 3 x 2. The test computes the traffic of every
/// rank, and the program that of one rank of each replica, with the update of each rank.
fn assert_says(said: &Value, spec: ModelSpec) -> Plan {
    assert_says_with(said, spec, PlanOptions::default())
}

fn assert_says_with(said: &Value, spec: ModelSpec, options: PlanOptions) -> Plan {
    let mesh = Mesh::new(3, 2).expect("a mesh");
    let plan = Plan::new(spec, mesh, options).expect("a plan");
    assert_eq!(said["fingerprint"], format!("{:016x}", plan.fingerprint()));
    let of_ranks: Vec<Traffic> = mesh.ranks().map(|rank| plan.traffic(rank, 4)).collect();
    let bytes = |traffic: &Traffic| traffic.total().bytes;
    let most = of_ranks.iter().map(bytes).max().expect("ranks");
    let busiest = of_ranks.iter().position(|it| bytes(it) == most).expect("one of them");
    let as_busy = of_ranks.iter().filter(|it| bytes(it) == most).count();
    assert!(as_busy < 6, "the case is one in which ranks differ");
    assert_eq!(said["traffic"]["worst_rank"], busiest);
    assert_eq!(said["traffic"]["ranks_as_busy"], as_busy);
    assert_eq!(said["traffic"]["rank"], flows(&of_ranks[busiest]));
    let sum = |of: fn(&Traffic) -> Flow| of_ranks.iter().map(of).sum::<Flow>();
    let all = Traffic {
        all_gather: sum(|it| it.all_gather),
        reduce_scatter: sum(|it| it.reduce_scatter),
        all_reduce: sum(|it| it.all_reduce),
        scatter_sums: sum(|it| it.scatter_sums),
        gather_slices: sum(|it| it.gather_slices),
        statistics: sum(|it| it.statistics),
        update: sum(|it| it.update),
    };
    assert_eq!(said["traffic"]["all_ranks"], flows(&all));
    let host = &said["memory"]["places"]["host"];
    assert_eq!(host["total"], plan.memory().total().get());
    assert_eq!(host["optimizer"], plan.memory().optimizer.get());
    assert_eq!(host["full_backward"], plan.full_in(Phase::Backward).get());
    assert_eq!(said["units"][1]["padding"], plan.layouts()[1].padding().get());
    plan
}

#[test]
fn state_over_the_world_has_the_numbers_of_the_library() {
    let options = PlanOptions { state: StateOver::World, ..PlanOptions::default() };
    let state = |optimizer: &str, param: &Param| match (optimizer, param.shape.len()) {
        ("muon", 2) => State::Muon,
        ("adafactor", _) => State::Factored,
        _ => State::Elements(2),
    };
    for optimizer in ["adamw", "muon", "adafactor"] {
        let said = planned_over("world", MODEL, optimizer);
        assert_eq!(said["state_over"], "world");
        assert_says_with(&said, same().updated_by(|param| state(optimizer, param)), options);
        let calls = ["all_reduce", "scatter_sums", "gather_slices"]
            .map(|name| said["traffic"]["rank"][name]["calls"].clone());
        assert_eq!(calls, [0, 2, 2].map(Value::from), "{optimizer}");
    }
    let folder = Folder::new();
    let file = folder.file("model.json", MODEL);
    let arguments = ["plan", &*file, "--mesh", "3x2", "--param-dtype", "bf16"];
    let (code, text, _) = hsdp(&[&arguments[..], &["--state-over", "world"]].concat());
    assert_eq!(code, Some(0));
    for said in ["state over world", "gather_slices", "except `shard`, `optimizer` and `update`"] {
        assert!(text.contains(said), "{said} in {text}");
    }
    let program = ["--state-over", "world", "--program"];
    let (_, text, _) = hsdp(&[&arguments[..], &program].concat());
    assert!(text.contains("c0") && text.contains("\nupdate: h0 h1\n"), "{text}");
}

#[test]
fn options_reach_the_plan() {
    let mesh = ["gpt2-small", "--mesh", "2x2"];
    let spec = || planned(&mesh)["parameters"].as_u64().expect("a number");
    let words = [("adamw", 2), ("momentum", 1), ("lion", 1), ("sgd", 0)];
    for (optimizer, words) in words {
        let plan = planned(&[&mesh[..], &["--optimizer", optimizer]].concat());
        assert_eq!(plan["memory"]["places"]["host"]["optimizer"], words * 4 * spec() / 2);
    }
    let half = planned(&[&mesh[..], &["--param-dtype", "bf16", "--reduce-dtype", "bf16"]].concat());
    assert_eq!(half["memory"]["places"]["host"]["gather_input"], 2 * spec() / 2);
    let calls = |mode: &str| {
        let options = ["--accumulation", mode, "--microbatches", "5"];
        planned(&[&mesh[..], &options].concat())["traffic"]["rank"]["all_reduce"]["calls"].clone()
    };
    assert_eq!(["reduce-scatter", "every", "local"].map(calls), [13, 65, 13].map(Value::from));
}

#[test]
fn what_is_offloaded_is_told_of_both_places() {
    let model = ["llama3-8b", "--mesh", "1x8", "--device", "cuda"];
    let all = planned(&[&model[..], &["--offload", "all"]].concat());
    let places = &all["memory"]["places"];
    assert_eq!(
        (&places["device"]["shard"], &places["device"]["optimizer"]),
        (&0.into(), &0.into())
    );
    assert_eq!(places["host"]["shard"], 4 * 8_030_261_248_u64 / 8);
    let host = ["plan", "llama3-8b", "--mesh", "1x8", "--offload", "all"];
    let expected =
        "hsdp: --offload all needs --device cuda: there is nothing to offload from the host";
    assert_eq!(Folder::new().refused(&host), expected);
    assert_eq!(Offload::EVERY.len(), 3, "a new choice would have to be looked at here");
}

/// Owners get and return matrices through the host, with and without offloading.
#[test]
fn muon_on_a_device_takes_memory_of_the_host() {
    let on_device = |optimizer: &str| {
        let model = ["gpt2-small", "--mesh", "1x4", "--device", "cuda", "--optimizer", optimizer];
        planned(&model)["memory"]["places"].clone()
    };
    let muon = on_device("muon");
    let adamw = on_device("adamw");
    assert_eq!(adamw.get("host"), None);
    let shards = 124_439_808 / 4 * 4;
    assert!(muon["device"]["update"].as_u64() > Some(0), "{muon}");
    // A rank has a quarter of the pieces, and a quarter of the owned matrices, which leave out the
    // embeddings.
    let on_host = muon["host"]["update"].as_u64().expect("bytes");
    assert!((shards..2 * shards).contains(&on_host), "{muon}");
    assert_eq!(muon["host"]["total"], on_host);
}

#[test]
fn optimizers_that_update_on_the_host_are_not_planned_on_a_device() {
    for (optimizer, is_refused) in
        [("adafactor", true), ("adamw8bit", true), ("lion", false), ("muon", false)]
    {
        let model = ["gpt2-small", "--mesh", "1x2", "--device", "cuda", "--optimizer", optimizer];
        let (code, _, told) = hsdp(&[&["plan"], &model[..]].concat());
        let expected = match is_refused {
            true => format!(
                "hsdp: --optimizer {optimizer} does not update a model on a device: add --offload optimizer\n"
            ),
            false => String::new(),
        };
        assert_eq!((code, told), (Some(if is_refused { 2 } else { 0 }), expected));
        let offloaded = planned(&[&model[..], &["--offload", "optimizer"]].concat());
        assert!(offloaded["memory"]["places"]["host"]["optimizer"].as_u64() > Some(0));
    }
}

#[test]
fn text_names_the_worst_rank_and_the_totals() {
    let folder = Folder::new();
    let (code, text, _) = hsdp(&["plan", &folder.file("model.json", MODEL), "--mesh", "3x2"]);
    assert_eq!(code, Some(0));
    for said in ["523 parameters in 2 units", "is the same on every rank, except", "the most bytes"]
    {
        assert!(text.contains(said), "{said} in {text}");
    }
}

/// All bars have one width, and padding is hatched.
#[test]
fn a_picture_has_a_box_for_each_shard_and_hatches_padding() {
    let folder = Folder::new();
    let file = folder.file("model.json", &MODEL.replace("\"w\"", "\"w<&>\""));
    let picture = folder.at("owners.svg");
    let (code, _, _) = hsdp(&["plan", &file, "--mesh", "3x2", "--svg", &picture]);
    assert_eq!(code, Some(0));
    let text = fs::read_to_string(&picture).expect("drawn");
    assert!(text.contains("w&lt;&amp;&gt; 0..") && !text.contains("w<&>"), "{text}");
    // Two trainable regions and a frozen one, on two shards.
    assert_eq!(text.matches("<title>shard ").count(), 6);
    assert!(text.matches("<title>padding: ").count() >= 3, "{text}");
    assert_eq!(text.matches('<').count(), text.matches('>').count());
    let told = folder.refused(&["plan", "gpt2-small", "--mesh", "1x257", "--svg", &picture]);
    let expected = "hsdp: --svg draws at most 256 shards and 1000 units; the plan has 257 and 13";
    assert_eq!(told, expected);
}

/// Files, and the beginning of the message after their name.
const WRONG: &[(&str, &str)] = &[
    ("{", "EOF while parsing an object at line 1 column 1"),
    ("{}", "missing field `units` at line 1 column 2"),
    ("{\"units\": []}", "the model has 0 units"),
    (r#"{"units": [{"name": "u", "params": []}]}"#, "unit `u` has 0 parameters"),
    (
        r#"{"units": [{"name": "u", "params": [{"name": "w", "shape": [2, -1]}]}]}"#,
        "units[0].params[0].shape[1]: invalid value: integer `-1`, expected usize at line 1 column 65",
    ),
    (
        r#"{"units": [{"name": "u", "params": [{"name": "w", "shape": [2], "frosen": true}]}]}"#,
        "units[0].params[0].frosen: unknown field `frosen`, expected one of `name`, `shape`, `frozen`, `rows`, `blocks`, `matrices`, `lookup` at line 1 column 72",
    ),
    (
        r#"{"units": [{"name": "u", "params": [{"name": "w", "shape": [2, 0]}]}]}"#,
        "units[0].params[0].shape[1]: parameter `w` has a dim of size 0",
    ),
    (
        r#"{"units": [{"name": "u", "params": [{"name": "w", "shape": [2, 2], "rows": 1, "blocks": 2}]}]}"#,
        "units[0].params[0]: parameter `w` has both `rows` and `blocks`; at most one is possible",
    ),
    (
        r#"{"units": [{"name": "u", "params": [], "attention": {"heads": 1, "size": 2, "window": 3, "stored": true}}]}"#,
        "units[0].attention: that of unit `u` has both `window` and `stored`; at most one is possible",
    ),
    (
        r#"{"units": [{"name": "u", "params": [{"name": "w", "shape": [2, 2], "matrices": [1, 2, 3]}]}]}"#,
        "parameter `w` of shape [2, 2] is not a stack of matrices, 1 of 2 x 3",
    ),
    (
        r#"{"units": [{"name": "u", "params": [{"name": "w", "shape": [400002], "matrices": [200001, 1, 2]}]}]}"#,
        "200001 matrices; at most 200000 are planned",
    ),
    (
        r#"{"units": [{"name": "", "params": [{"name": "w", "shape": [2]}]}]}"#,
        "units[0].name: it has 0 bytes; 1 to 256 are allowed",
    ),
    (
        r#"{"units": [{"name": "u", "params": [{"name": "w", "shape": [2]}, {"name": "w", "shape": [2]}]}]}"#,
        "two parameters are called `w`: number 0 and number 1 of the model",
    ),
    (
        r#"{"units": [{"name": "u", "params": [{"name": "w", "shape": [2]}]}], "ties": [{"name": "h", "to": "x"}]}"#,
        "tie `h` -> `x`: no parameter has the target's name",
    ),
    (
        r#"{"units": [{"name": "u", "params": [{"name": "w", "shape": [18446744073709551615, 9]}]}]}"#,
        "unit `u` takes",
    ),
];

/// The sums of rows and columns are twice as many as the elements.
#[test]
fn sums_beyond_64_bits_are_refused() {
    let model = r#"{"units": [{"name": "u", "params": [{"name": "w", "shape": [150000000000000, 1, 1]}]}]}"#;
    let told = refused(model, &["--mesh", "1x4096", "--optimizer", "adafactor"]);
    let end = "elements, 1 microbatches and 4096 ranks: the bytes of a step do not fit 64 bits";
    assert!(told.ends_with(end), "{told}");
}

#[test]
fn what_is_wrong_with_a_file_is_one_line_with_its_place() {
    for (model, expected) in WRONG {
        let told = refused(model, &["--mesh", "1x2"]);
        let line = told.strip_prefix("hsdp: DIR/model.json: ").unwrap_or(&told);
        assert!(line.starts_with(expected), "{model}: {told}");
    }
}

#[test]
fn what_cannot_be_planned_is_one_line() {
    let small = r#"{"units": [{"name": "u", "params": [{"name": "w", "shape": [2]}]}]}"#;
    for (arguments, expected) in [
        (&["--mesh", "0x2"][..], "mesh 0x2: each axis needs at least 1 rank"),
        (&["--mesh", "2048x1024"], "mesh 2048x1024 has 2097152 ranks; at most 1048576 are planned"),
        (&["--mesh", "1x2", "--param-dtype", "i32"], "invalid value 'i32' for '--param-dtype"),
        (&["--mesh", "1x2", "--microbatches", "0"], "invalid value '0' for '--microbatches"),
        (&[], "the following required arguments were not provided: --mesh <RxS>"),
    ] {
        let told = refused(small, arguments);
        assert!(told.contains(expected), "{told}");
    }
    let folder = Folder::new();
    let told = folder.refused(&["plan", "gpt3", "--mesh", "1x1"]);
    let models = "; a model is a file, a folder of transformers, or one of gpt2-small, llama3-8b, llama3-70b";
    assert!(told.ends_with(models), "{told}");
    let large = ["plan", "llama3-70b", "--mesh", "1024x1024", "--microbatches", "1048576"];
    let told = folder.refused(&large);
    assert!(told.ends_with("the bytes of a step do not fit 64 bits"), "{told}");
}

/// The example in PLAN.md is a valid model.
#[test]
fn the_page_has_an_example_that_runs() {
    let page = include_str!("../../PLAN.md");
    let example = page.split("```json").nth(1).and_then(|rest| rest.split("```").next());
    let folder = Folder::new();
    let file = folder.file("model.json", example.expect("an example"));
    let plan = planned(&[&file, "--mesh", "2x3"]);
    assert_eq!(plan["parameters"], 256 * 64 + 64 * 64 + 64 + 333 + 64);
}
