//! `hsdp simulate` and `hsdp search`: their numbers are the library's, and their errors are one
//! line.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::folder::{Folder, json};
use crate::program::hsdp;

const NODE: &str = include_str!("../../../simulator/machines/a100-node.toml");
const STEP: [&str; 10] = [
    "simulate",
    "llama3-8b",
    "--mesh",
    "2x8",
    "--machine",
    "h100-cluster",
    "--param-dtype",
    "bf16",
    "--context",
    "4096",
];

#[test]
fn a_window_of_a_file_saves_scores() {
    let folder = Folder::new();
    let flops = |window: &str| {
        let unit = format!(
            r#"{{"name": "u", "params": [{{"name": "w", "shape": [64, 64]}}],
            "attention": {{"heads": 4, "size": 16{window}}}}}"#
        );
        let model = folder.file("model.json", &format!(r#"{{"units": [{unit}]}}"#));
        let step = ["--mesh", "1x2", "--machine", "h100-cluster", "--context", "4096"];
        json(&[&["simulate", &*model], &step[..]].concat())["flops"].as_f64().expect("a number")
    };
    // 1024 - 1024 / 8 scores a token, in place of 2048.
    let saved = 12.0 * 2.0 * 4096.0 * 64.0 * (2048.0 - 896.0);
    assert_eq!(flops("") - flops(r#", "window": 1024"#), saved);
    let model = r#"{"units": [{"name": "u", "params": [{"name": "w", "shape": [2]}],
        "attention": {"heads": 4, "size": 16, "window": 0}}]}"#;
    let model = folder.file("model.json", model);
    let told = folder.refused(&["simulate", &model, "--mesh", "1x2", "--machine", "a100-node"]);
    assert!(told.ends_with("unit `u` has an attention with a window of 0 tokens"), "{told}");
}

#[test]
fn the_parts_of_a_step_add_up() {
    let step = json(&STEP);
    let seconds = step["seconds"].as_f64().expect("a time");
    assert!((0.05..2.0).contains(&seconds), "{seconds}");
    assert_eq!(step["tokens"], 16 * 4096);
    let ranks = step["ranks"].as_array().expect("ranks");
    assert_eq!(ranks.iter().filter_map(|it| it["count"].as_u64()).sum::<u64>(), 16);
    for rank in ranks {
        let shares = rank["shares"].as_object().expect("shares");
        let sum: f64 = shares.values().filter_map(Value::as_f64).sum();
        assert!((sum - rank["seconds"].as_f64().expect("a time")).abs() < 1e-9, "{rank}");
    }
    let parts = step["memory"]["parts"].as_object().expect("parts");
    let sum: u64 = parts.values().filter_map(Value::as_u64).sum();
    assert_eq!(step["memory"]["total"], sum);
}

/// Two replicas have half of the state each, and gather updated slices.
#[test]
fn replicas_that_divide_state_need_less_memory() {
    let folder = Folder::new();
    let timeline = folder.at("step.json");
    let step = |state| json(&[&STEP[..], &["--state-over", state, "--trace", &timeline]].concat());
    let operations = || {
        let text = fs::read_to_string(&timeline).expect("read");
        let count = |name: &str| text.matches(&format!("\"name\":\"{name} ")).count();
        ["all_reduce", "scatter_sums", "gather_slices"].map(|it| count(it) > 0)
    };
    let shards = step("shards");
    assert_eq!(operations(), [true, false, false]);
    assert_eq!(shards, json(&STEP));
    let world = step("world");
    assert_eq!(operations(), [false, true, true]);
    let part = |it: &Value, name: &str| it["memory"]["parts"][name].as_f64().expect("a number");
    for name in ["optimizer", "shard"] {
        let ratio = part(&shards, name) / part(&world, name);
        assert!((1.99..=2.0).contains(&ratio), "{name}: {ratio}");
    }
    assert_eq!(part(&world, "partial"), part(&shards, "partial"));
    for rank in world["ranks"].as_array().expect("ranks") {
        let shares = rank["shares"].as_object().expect("shares");
        let sum: f64 = shares.values().filter_map(Value::as_f64).sum();
        assert!((sum - rank["seconds"].as_f64().expect("a time")).abs() < 1e-9, "{rank}");
        assert_eq!(shares["exposed all-reduces"], 0.0);
    }
}

/// Otherwise this would take hours.
#[test]
fn ten_thousand_ranks_that_are_alike_are_simulated_as_one() {
    let mesh = ["--mesh", "1250x8", "--microbatches", "8", "--recompute"];
    let step =
        json(&[&["simulate", "llama3-70b", "--machine", "h100-cluster"], &mesh[..]].concat());
    let ranks = step["ranks"].as_array().expect("ranks");
    assert_eq!(ranks.len(), 1);
    assert_eq!(ranks[0]["count"], 10_000);
}

#[test]
fn traces_are_written_for_each_rank() {
    let folder = Folder::new();
    let timeline = folder.at("step.json");
    let chakra = folder.at("chakra");
    json(&[&STEP[..], &["--trace", &timeline, "--chakra", &chakra]].concat());
    let events: Value =
        serde_json::from_str(&fs::read_to_string(&timeline).expect("read")).expect("JSON");
    assert!(events["traceEvents"].as_array().is_some_and(|events| events.len() > 100));
    let traces = (0..16).map(|rank| Path::new(&chakra).join(format!("step.{rank}.et")));
    assert!(traces.into_iter().all(|trace| fs::metadata(trace).is_ok_and(|it| it.len() > 1000)));
    let groups: Value = serde_json::from_str(
        &fs::read_to_string(Path::new(&chakra).join("groups.json")).expect("read"),
    )
    .expect("JSON");
    assert_eq!(groups.as_object().map(serde_json::Map::len), Some(2 + 8));
}

/// The actions of all kinds of ranks are in a timeline, and those of all ranks in their files.
#[test]
fn large_traces_are_refused_before_they_are_written() {
    let folder = Folder::new();
    let timeline = folder.at("step.json");
    let chakra = folder.at("chakra");
    let refused = |mesh: &str, microbatches: &str, option: &str| {
        let step = ["simulate", "gpt2-small", "--machine", "h100-cluster", "--trace", &timeline];
        let chakra = ["--chakra", &chakra];
        let sizes = ["--mesh", mesh, "--microbatches", microbatches];
        let chakra = if option == "--chakra" { &chakra[..] } else { &[] };
        folder.refused(&[&step[..], chakra, &sizes].concat())
    };
    let message = refused("5x7", "10000", "--trace");
    assert!(
        message.contains(" kinds of ranks, ") && message.ends_with("; at most 4000000 are traced"),
        "{message}"
    );
    let message = refused("64x32", "1000", "--chakra");
    assert!(
        message.contains(" and 2048 ranks, ") && message.ends_with("; at most 50000000 are traced"),
        "{message}"
    );
    let message = refused("4097x1", "1", "--chakra");
    assert_eq!(message, "hsdp: mesh 4097x1 has 4097 ranks; at most 4096 get a trace each");
    assert!(!Path::new(&timeline).exists() && !Path::new(&chakra).exists());
}

#[test]
fn the_best_of_a_search_is_what_simulate_says() {
    let space =
        ["--ranks", "8", "--machine", "a100-node", "--context", "1024", "--batch-tokens", "65536"];
    let folder = Folder::new();
    let page = folder.at("page.html");
    let html = ["--html", &page];
    let found = json(&[&["search", "gpt2-small", "--top", "3"][..], &space, &html].concat());
    let page = fs::read_to_string(&page).expect("written");
    assert_eq!(page.matches("<svg").count(), 3, "meshes, a step, memory");
    assert!(
        ["http:", "https:", "src=", "href="].iter().all(|it| !page.contains(it)),
        "it needs nothing else"
    );
    let best = found["best"].as_array().expect("a list");
    assert_eq!(best.len(), 3);
    assert_eq!(page.matches("<tr><td>tie</td>").count(), 3);
    assert_eq!(found["error"], 0.062);
    let number = |it: &Value, name: &str| it[name].as_f64().expect("a number");
    for it in best {
        let behind = number(&found, "fastest") / number(it, "tokens_per_second") - 1.0;
        assert!(it["ties"] == true && behind < 0.062, "{it}");
        assert_eq!(it["tokens"], 65536);
    }
    let memory = best.iter().map(|it| number(it, "memory") + number(it, "memory_on_host"));
    assert!(memory.is_sorted(), "{best:?}");
    assert!(found["simulated"].as_u64() < found["candidates"].as_u64());
    let options = best[0]["options"].as_str().expect("options");
    assert!(options.ends_with(" --context 1024"), "{options}");
    let mut arguments = vec!["simulate", "gpt2-small", "--machine", "a100-node"];
    arguments.extend(options.split(' '));
    assert_eq!(json(&arguments)["seconds"], best[0]["seconds"]);
}

/// Replicas that divide state need less memory than others on their mesh.
#[test]
fn a_search_divides_state_among_replicas() {
    let space = ["--ranks", "2", "--machine", "two-core-cpu", "--batch-tokens", "4096"];
    let found = json(&[&["search", "gpt2-small", "--top", "1000"], &space[..]].concat());
    let best = found["best"].as_array().expect("a list");
    let options = best.iter().filter_map(|it| Some((it, it["options"].as_str()?)));
    let divided: Vec<_> = options.filter(|(_, it)| it.contains("--state-over world")).collect();
    assert!(!divided.is_empty(), "{found}");
    for (found, options) in divided {
        assert!(options.starts_with("--mesh 2x1 "), "{options}");
        let simulate = ["simulate", "gpt2-small", "--machine", "two-core-cpu"];
        let options: Vec<&str> = options.split(' ').collect();
        let again = json(&[&simulate[..], &options[..]].concat());
        assert_eq!(again["seconds"], found["seconds"]);
        assert_eq!(again["memory"]["total"], found["memory"]);
    }
}

/// Ten results of a model on many ranks used to differ by hundredths of a percent, and by the
/// number of their tokens.
#[test]
fn steps_that_cannot_be_told_apart_are_ties() {
    let space = ["--ranks", "1024", "--machine", "h100-cluster", "--context", "8192"];
    let tokens = ["--batch-tokens", "16777216"];
    let (_, text, _) = hsdp(&[&["search", "llama3-70b"], &space[..], &tokens].concat());
    let error = "predictions for several machines, or numbers that were fitted to no steps have errors of up to 20.2 %, so steps that differ by less tie";
    assert!(text.contains(error), "{text}");
    let lines: Vec<&str> = text.lines().filter(|it| it.contains("tokens/s, ")).collect();
    assert!(lines[0].starts_with("1. tie: memory "), "{text}");
    assert!(lines.iter().all(|it| it.contains(" a step of 16777216 tokens ")), "{text}");
    assert!(!text.contains("different numbers of tokens"), "{text}");
    let meshes = text.lines().filter_map(|it| it.trim().strip_prefix("--mesh "));
    let meshes: Vec<&str> = meshes.filter_map(|it| it.split(' ').next()).collect();
    let mut ties: Vec<&str> =
        lines.iter().zip(&meshes).filter(|(it, _)| it.contains(" tie: ")).map(|it| *it.1).collect();
    let count = ties.len();
    ties.sort_unstable();
    ties.dedup();
    assert!(count > 3 && ties.len() == count, "each mesh once: {text}");
    // A shorter list leaves out ties that are neither slower nor need as much memory on their mesh.
    let first = [&["search", "llama3-70b", "--top", "1"], &space[..], &tokens].concat();
    let (_, cut, _) = hsdp(&first);
    assert!(cut.contains(", or come later in the order of the list\n"), "{cut}");
    let open = ["--ranks", "1", "--machine", "a100-node", "--batch-tokens", "any"];
    let (_, text, _) = hsdp(&[&["search", "gpt2-small"], &open[..]].concat());
    assert!(text.contains("; steps have different numbers of tokens"), "{text}");
}

/// A search had a plan and a simulation for each of any number of candidates.
#[test]
fn large_searches_end_or_are_refused() {
    let search = |ranks: &str, tokens: &str| {
        let space = ["--ranks", ranks, "--machine", "h100-cluster", "--batch-tokens", tokens];
        hsdp(&[&["search", "gpt2-small", "--top", "2"], &space[..]].concat())
    };
    let (code, text, told) = search("16", "165150720");
    assert_eq!((code, &*told), (Some(0), ""), "{text}");
    let (code, _, told) = search("15120", "22763995398144000");
    assert_eq!(code, Some(2));
    assert!(told.ends_with("; at most 2097152 are searched\n"), "{told}");
}

/// Returns the result of a search for the fastest step of gpt2-small within some memory, and the
/// text of its page.
fn page(memory: &str) -> (Value, String) {
    let folder = Folder::new();
    let file = folder.at("page.html");
    let space = ["--ranks", "8", "--machine", "a100-node", "--batch-tokens", "1048576"];
    let found = ["search", "gpt2-small", "--top", "1", "--memory", memory, "--html", &file];
    (json(&[&found[..], &space].concat()), fs::read_to_string(&file).expect("written"))
}

#[test]
fn at_most_eight_microbatches_are_drawn() {
    let (found, page) = page("4GiB");
    let best = found["best"][0]["options"].as_str().expect("options");
    assert!(best.contains(" --microbatches 32 "), "{best}");
    assert!(page.contains("The step has 32 microbatches; one of 8 is drawn."));
    assert_eq!(page.matches("<title>backward, ").count(), 8);
}

/// On a host each channel is a lane of its own, and on a device all are one.
#[test]
fn the_lanes_of_a_step_are_named_by_the_place_of_the_model() {
    let folder = Folder::new();
    let file = folder.at("page.html");
    for (machine, ranks, lane) in
        [("two-core-cpu", "4", ">reductions</text>"), ("a100-node", "8", ">collectives</text>")]
    {
        let space = ["--ranks", ranks, "--machine", machine, "--batch-tokens", "65536"];
        let found = ["search", "gpt2-small", "--top", "1", "--memory", "64GiB", "--html", &file];
        json(&[&found[..], &space].concat());
        let page = fs::read_to_string(&file).expect("written");
        for name in [">reductions</text>", ">collectives</text>"] {
            assert_eq!(page.contains(name), name == lane, "{machine}: {name}");
        }
    }
}

/// Those that need the state on the host are searched with it there.
#[test]
fn a_search_finds_only_what_simulate_takes() {
    let space = ["--ranks", "8", "--machine", "a100-node", "--optimizer", "adamw8bit"];
    let open = ["--batch-tokens", "any", "--top", "50"];
    let found = json(&[&["search", "gpt2-small"], &space[..], &open].concat());
    let best = found["best"].as_array().expect("a list");
    let options = best.iter().filter_map(|it| it["options"].as_str());
    assert!(options.into_iter().all(|it| it.contains(" --offload ")), "{found}");
}

#[test]
fn impossible_choices_are_refused() {
    let folder = Folder::new();
    let host = ["simulate", "gpt2-small", "--mesh", "1x2", "--machine", "two-core-cpu"];
    let message = folder.refused(&[&host[..], &["--offload", "optimizer"]].concat());
    assert_eq!(
        message,
        "hsdp: --offload optimizer: two-core-cpu has no device, so there is nothing to offload"
    );
    let search = ["search", "gpt2-small", "--ranks", "8", "--machine", "a100-node"];
    let told = folder.refused(&[&search[..], &["--top", "0", "--batch-tokens", "any"]].concat());
    assert!(told.contains("0 is not in 1..=1000"), "{told}");
    // Steps of different numbers of tokens are compared on purpose alone.
    assert!(folder.refused(&search).contains("--batch-tokens <TOKENS>"));
    let message = folder.refused(&[&search[..], &["--batch-tokens", "some"]].concat());
    assert!(message.ends_with("expected a whole number, or any"), "{message}");
}

/// Offloaded memory of all ranks of a host is held against that of the host.
#[test]
fn a_host_without_memory_does_not_fit() {
    let folder = Folder::new();
    let small = NODE.replace("capacity = { value = \"2 TB\"", "capacity = { value = \"1 GB\"");
    let machine = folder.file("small.toml", &small);
    let step = |machine: &str| {
        let choices = ["--mesh", "1x8", "--machine", machine, "--offload", "all"];
        hsdp(&[&["simulate", "gpt2-small"], &choices[..]].concat()).1
    };
    assert!(!step("a100-node").contains("does not fit"));
    assert!(step(&machine).contains("is more than its 1 GB: the step does not fit"));
}

#[test]
fn the_table_says_how_many_kinds_of_ranks_it_hides() {
    let step = ["simulate", "gpt2-small", "--mesh", "5x7", "--machine", "h100-cluster"];
    let (_, text, _) = hsdp(&step);
    let kinds = json(&step)["ranks"].as_array().expect("a list").len();
    let hidden = format!("and {} more kinds of ranks", kinds - 4);
    assert!(text.contains(&hidden), "{hidden}: {text}");
}

#[test]
fn updates_of_whole_matrices_are_refused() {
    let folder = Folder::new();
    let step = ["simulate", "gpt2-small", "--mesh", "1x8", "--machine", "a100-node"];
    let message = folder.refused(&[&step[..], &["--optimizer", "muon"]].concat());
    assert!(message.ends_with(" is not modelled, as by Muon"), "{message}");
}

/// Each time is rounded to picoseconds.
#[test]
fn a_step_without_time_has_no_speed() {
    let folder = Folder::new();
    let number = |value: &str| format!("{{ value = \"{value}\", source = \"a test\" }}");
    let machine = format!(
        "name = \"fast\"\nkind = \"host\"\nranks = {one}\n\
         [memory]\ncapacity = {bytes}\nbandwidth = {speed}\nefficiency = {one}\n\
         [compute]\nf32 = {flops}\nbf16 = {flops}\nf16 = {flops}\nefficiency = {one}\nhalf = {flop}\nunaligned = {one}\n\
         launch = {zero}\nkernel = {zero}\n[calls]\nissue = {zero}\nstart = {zero}\n[threads]\nswitch = {zero}\n",
        one = number("1"),
        bytes = number("1 GB"),
        speed = number("1 EB/s"),
        flops = number("1000 Eflop/s"),
        flop = number("1 flop"),
        zero = number("0 s"),
    );
    let machine = folder.file("fast.toml", &machine);
    let units = r#"[{"name": "one", "params": [{"name": "w", "shape": [2, 2]}]}]"#;
    let model = folder.file("model.json", &format!("{{\"units\": {units}}}"));
    let expected = "hsdp: a step takes less than a picosecond on fast: it has no speed";
    let context = ["--machine", &machine, "--context", "1"];
    let search = ["search", &model, "--ranks", "1", "--batch-tokens", "1"];
    for command in [&["simulate", &model, "--mesh", "1x1"][..], &search] {
        assert_eq!(folder.refused(&[command, &context].concat()), expected);
    }
}

#[test]
fn bad_input_is_one_line() {
    let folder = Folder::new();
    let lines: Vec<_> = NODE.lines().filter(|line| !line.starts_with("launch")).collect();
    let without = folder.file("without.toml", &lines.join("\n"));
    let negative = folder.file("negative.toml", &NODE.replace("\"2039 GB/s\"", "\"-1 GB/s\""));
    let large = folder.file("large.toml", &" ".repeat(2 << 20));
    let step = |machine: &str| {
        folder.refused(&["simulate", "gpt2-small", "--mesh", "1x8", "--machine", machine])
    };
    assert_eq!(
        step(&without),
        "hsdp: DIR/without.toml: machine file, line 10, compute: missing field `launch`"
    );
    let message = step(&negative);
    assert!(
        message.starts_with("hsdp: DIR/negative.toml: machine file, line 7, memory.bandwidth:"),
        "{message}"
    );
    assert!(message.contains("-1 GB/s"), "{message}");
    assert!(step(&large).ends_with("it has more than 1048576 bytes"), "{}", step(&large));
    assert!(step("b200").ends_with(
        "a machine is a file, or one of a100-node, a100-cluster, h100-cluster, two-core-cpu"
    ));
    let ranks = ["simulate", "gpt2-small", "--mesh", "2x8", "--machine", "a100-node"];
    assert_eq!(
        folder.refused(&ranks),
        "hsdp: machine a100-node has 8 cards and no network: it cannot hold the 16 ranks of mesh 2x8"
    );
    let search = ["search", "llama3-70b", "--ranks", "2", "--machine", "a100-node"];
    let message = folder.refused(&[&search[..], &["--batch-tokens", "any"]].concat());
    assert!(message.starts_with("hsdp: llama3-70b fits no mesh: of "), "{message}");
    let tokens = [
        "search",
        "gpt2-small",
        "--ranks",
        "8",
        "--machine",
        "a100-node",
        "--batch-tokens",
        "1000",
    ];
    assert_eq!(
        folder.refused(&tokens),
        "hsdp: a step of 1000 tokens is no multiple of 2048 tokens of a sequence on each of 8 ranks"
    );
}

#[test]
fn steps_beyond_all_measure_are_refused() {
    let folder = Folder::new();
    let large = ["--batch", "1048576", "--context", "16777216"];
    let step = ["simulate", "gpt2-small", "--mesh", "1x8", "--machine", "h100-cluster"];
    let message = folder.refused(&[&step[..], &large, &["--microbatches", "1048576"]].concat());
    assert_eq!(message, "hsdp: the step takes 213 days or longer: it is not simulated");
    let search = ["search", "gpt2-small", "--ranks", "8", "--machine", "a100-node"];
    let message =
        folder.refused(&[&search[..], &["--batch-tokens", "9223372036854775808"]].concat());
    assert!(message.starts_with("hsdp: gpt2-small fits no mesh: "), "{message}");
}

const STEPS: &str = "gpus,global_batch,micro_batch,width,heads,layers,context,step_ms\n";

#[test]
fn measured_steps_are_predicted() {
    let folder = Folder::new();
    let row = "8,128,8,2048,16,16,1024,688.425037\n";
    let table = folder.file("steps.csv", &format!("{STEPS}{row}"));
    let (code, text, _) = hsdp(&["simulate", "--against", &table, "--machine", "a100-node"]);
    assert_eq!(code, Some(0));
    let last = text.trim_end().lines().last().expect("a line");
    assert!(last.starts_with("1 steps, mean error ") && last.contains(" %, worst "), "{last}");
    let error = last.split([' ', ',']).filter_map(|word| word.parse::<f64>().ok()).next_back();
    assert!(error.is_some_and(|error| error < 8.0), "{last}");
    let torn = folder.file("torn.csv", &format!("{STEPS}8,128\n"));
    let message = folder.refused(&["simulate", "--against", &torn, "--machine", "a100-node"]);
    assert!(message.starts_with("hsdp: DIR/torn.csv: table, line 2: "), "{message}");
}
