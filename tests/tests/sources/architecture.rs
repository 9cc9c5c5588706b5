//! The rules that hold between the crates of the project, and for its files and folders.
//! docs/architecture.md gives the reasons.

use std::collections::BTreeSet;

use cargo_metadata::{Metadata, MetadataCommand, Package};
use hsdp_tests::support::modules::Modules;
use hsdp_tests::support::sources::{self, Source};

/// The crates, from the bottom up: each may depend on those before it, and on none beside or behind
/// it.
const LAYERS: [&[&str]; 10] = [
    &["hsdp-warnings"],
    &["hsdp-sharding", "hsdp-checkpoint", "nccl-sys"],
    &["hsdp-kernels", "hsdp-control"],
    &["hsdp-flight"],
    &["hsdp-comm", "hsdp-simulator"],
    &["hsdp"],
    &["hsdp-candle", "hsdp-train"],
    &["hsdp-models"],
    &["hsdp-cli"],
    &["hsdp-tests", "hsdp-benches"],
];

/// Crates that only some others may depend on, and those others.
const HOMES: [(&str, &[&str]); 5] = [
    ("hsdp-train", &["hsdp-models", "hsdp-cli", "hsdp-tests", "hsdp-benches"]),
    ("nccl-sys", &["hsdp-comm"]),
    ("shuttle", &["hsdp-comm", "hsdp-flight"]),
    ("candle-core", &["hsdp-candle", "hsdp-models", "hsdp-cli", "hsdp-tests", "hsdp-benches"]),
    ("candle-nn", &["hsdp-candle", "hsdp-models", "hsdp-cli", "hsdp-tests", "hsdp-benches"]),
];

/// The features, and the crates that may have a feature where not all may. Tests have no features:
/// they use `cfg`.
const FEATURES: [(&str, Option<&[&str]>); 5] = [
    ("cuda", None),
    ("nccl", None),
    ("mpi", None),
    ("candle-cuda", Some(&["hsdp-candle", "hsdp-models", "hsdp-tests"])),
    ("data", Some(&["hsdp-models"])),
];

/// The feature that may be on by default.
const BY_DEFAULT: &str = "data";

/// The crate whose modules stand on floors. In its folders, too, no modules import each other in a
/// circle.
const WITH_FLOORS: &str = "runtime/src";

/// The modules directly below its root, from the bottom up: each may import those before it alone.
const FLOORS: [&str; 9] =
    ["error", "options", "state", "agree", "step", "model", "persist", "optimizer", "checkpoint"];

/// The module beside the floors, which may import the first one alone, and which no floor may
/// import.
const BESIDE: &str = "autograd";

/// The modules that repeat names of others for programs.
const FRONTS: [&str; 2] = ["prelude", "testing"];

/// Lists of functions in docs/architecture.md, file by file.
const WAYS: [&str; 2] = ["## A gradient's way", "## The partial's way back"];

#[test]
fn each_crate_knows_only_those_before_it() {
    let wrong: Vec<String> =
        edges().filter_map(|(from, to)| what_is_wrong_with(&from, &to)).collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn every_crate_has_its_place() {
    for package in workspace().workspace_packages() {
        let place = layer(&package.name);
        let missing = format!(
            "{} has no place: give it one in docs/architecture.md and in this test's LAYERS",
            package.name
        );
        assert!(place.is_some(), "{missing}");
    }
}

#[test]
fn a_crate_that_has_a_home_is_known_there_only() {
    for (from, to) in all_edges() {
        let home = HOMES.iter().find(|(name, _)| *name == to);
        let at_home = home.is_none_or(|(_, home)| home.contains(&from.as_str()));
        assert!(
            at_home,
            "{from} depends on {to}, which is for {home:?} only: see docs/architecture.md"
        );
    }
}

#[test]
fn wrong_edges_are_told_apart_from_right_ones() {
    let said = what_is_wrong_with("hsdp-kernels", "hsdp-comm").expect("it is wrong");
    let because = "docs/architecture.md says that each crate knows only those before it";
    assert_eq!(
        said,
        format!("hsdp-kernels depends on hsdp-comm, which is not before it: {because}")
    );
    assert!(what_is_wrong_with("hsdp-tests", "hsdp-benches").is_some());
    assert!(what_is_wrong_with("hsdp-candle", "hsdp-tests").is_some());
    assert!(what_is_wrong_with("hsdp", "hsdp-candle").is_some());
    assert!(what_is_wrong_with("nccl-sys", "hsdp-sharding").is_some());
    assert_eq!(what_is_wrong_with("hsdp-comm", "nccl-sys"), None);
    assert_eq!(what_is_wrong_with("hsdp-candle", "hsdp-sharding"), None);
    assert!(edges().next().is_some(), "the edges are read from cargo");
}

#[test]
fn no_modules_import_each_other_in_a_circle() {
    let sources = sources::rust();
    let root = |it: &Source| -> Option<String> {
        let front =
            ["src/lib.rs", "src/main.rs"].into_iter().find(|front| it.path.ends_with(front))?;
        it.path.strip_suffix(&front[3..]).map(str::to_owned)
    };
    let roots: BTreeSet<String> = sources.iter().filter_map(root).collect();
    assert!(!roots.is_empty(), "the crates are found");
    for root in roots {
        let modules = Modules::of(&root, &sources);
        let folders = match root == WITH_FLOORS {
            true => modules.folders(),
            false => [String::new()].into(),
        };
        for folder in folders {
            let imports = modules.below(&folder);
            let within: Vec<_> =
                imports.circles().iter().map(|circle| imports.within(circle)).collect();
            let names = [&*root].into_iter().chain(folder.split("::")).filter(|it| !it.is_empty());
            let folder = names.collect::<Vec<_>>().join("/");
            assert!(
                within.is_empty(),
                "{folder}: a module imports only those that do not lead back to it:\n{}",
                within.join("\n")
            );
        }
    }
}

#[test]
fn the_modules_of_the_runtime_import_only_floors_below_them() {
    let modules = Modules::of(WITH_FLOORS, &sources::rust());
    let top = modules.below("");
    let expected: BTreeSet<&str> = FLOORS.into_iter().chain(FRONTS).chain([BESIDE]).collect();
    assert_eq!(top.modules().collect::<BTreeSet<_>>(), expected, "each module has its floor");
    let upward = modules.forbidden(is_below);
    assert!(upward.is_empty(), "docs/architecture.md, \"The modules of the runtime\": {upward:#?}");
}

/// Whether a module of the runtime may import another.
fn is_below(module: &str, imported: &str) -> bool {
    let floor = |name| FLOORS.iter().position(|floor| *floor == name);
    match (floor(module), floor(imported)) {
        (Some(floor), Some(imported)) => imported < floor,
        (None, Some(imported)) => FRONTS.contains(&module) || imported == 0,
        _ => false,
    }
}

#[test]
fn an_import_from_above_is_told_apart_from_one_from_below() {
    for (module, below) in [("step", "agree"), ("checkpoint", "error"), ("autograd", "error")] {
        assert!(is_below(module, below) && !is_below(below, module), "{module} and {below}");
    }
    assert!(is_below("prelude", "optimizer") && !is_below("optimizer", "prelude"));
    for apart in ["options", "step"] {
        assert!(!is_below("autograd", apart) && !is_below(apart, "autograd"), "{apart}");
    }
    assert!(!is_below("model", "model"));
}

#[test]
fn the_ways_of_a_gradient_are_as_the_page_says() {
    let texts = sources::texts();
    let text = |path: &str| texts.iter().find(|it| it.path == path).map(|it| it.text.as_str());
    let page = text("docs/architecture.md").expect("the page is there");
    for heading in WAYS {
        let steps = steps_below(page, heading);
        assert!(steps.len() > 5, "{heading}: its list is found");
        let files: BTreeSet<&str> = steps.iter().map(|(file, _)| *file).collect();
        assert_eq!(files.len(), steps.len(), "{heading}: each file appears once");
        for (file, functions) in steps {
            let code = text(file).unwrap_or_else(|| panic!("{heading}: {file} is gone"));
            for function in functions {
                assert!(has_function(code, function), "{heading}: {file} has no `{function}`");
            }
        }
    }
}

#[test]
fn the_files_that_pages_name_are_there() {
    let texts = sources::texts();
    let text =
        |page: &str| &texts.iter().find(|it| it.path == page).expect("the page is there").text;
    let links = text("docs/architecture.md").split("](../").skip(1);
    let links: Vec<&str> = links.filter_map(|rest| rest.split([')', '#']).next()).collect();
    // The tables of the index of tests name a file, or a folder, in their second cells.
    let rows = text("tests/README.md").lines().filter_map(|line| line.strip_prefix('|'));
    let rows = rows.filter_map(|row| row.split('|').nth(1)?.split('`').nth(1));
    let rows: Vec<&str> = rows.collect();
    assert!(!links.is_empty() && !rows.is_empty(), "the links and the rows are found");
    for file in links.into_iter().chain(rows) {
        assert!(sources::root().join(file).exists(), "a page names {file}, which is gone");
    }
}

/// The items of the numbered list below a heading: the file that each links to, and the functions
/// that it names.
fn steps_below<'a>(page: &'a str, heading: &str) -> Vec<(&'a str, Vec<&'a str>)> {
    let section = page.split(heading).nth(1).unwrap_or("").split("\n## ").next().unwrap_or("");
    let step = |item: &'a str| {
        let file = item.split("](../").nth(1)?.split(')').next()?;
        let quoted = item.split('`').skip(1).step_by(2);
        Some((file, quoted.filter_map(|it| it.strip_suffix("()")).collect()))
    };
    section.split(". [").skip(1).filter_map(step).collect()
}

/// Whether a file has a function: `name` by itself, or `Type::name` in a block that begins with
/// `impl` and names the type.
fn has_function(code: &str, function: &str) -> bool {
    let (owner, name) = function.rsplit_once("::").unwrap_or(("", function));
    let mut block = String::new();
    let begin = format!("fn {name}");
    code.lines().any(|line| {
        // A long header takes several lines.
        let continues = block.starts_with("impl") && !block.contains('{');
        if line.starts_with("impl") || line.starts_with('}') {
            block = line.to_owned();
        } else if continues {
            block += line;
        }
        let is_it = line.split(&begin).nth(1).is_some_and(|rest| rest.starts_with(['(', '<']));
        let owned = block.split(|it: char| !it.is_alphanumeric()).any(|word| word == owner);
        is_it && if owner.is_empty() { !block.starts_with("impl") } else { owned }
    })
}

#[test]
fn a_function_is_told_apart_from_one_of_another_type() {
    let code = "fn a() {}\nimpl<T> One for Two<T> {\n    pub fn b<X>(self) {}\n}\nfn c() {}\n\
        impl<T>\n    One for Four<T>\n{\n    fn e() {}\n}\n";
    for there in ["a", "One::b", "Two::b", "c", "Four::e"] {
        assert!(has_function(code, there), "{there}");
    }
    for absent in ["b", "One::a", "Three::b", "Two::c", "d"] {
        assert!(!has_function(code, absent), "{absent}");
    }
    let page =
        "x\n## A\n1. [f.rs](../a/f.rs): `T::g()`, not `h`;\n   `i()`.\n## B\n1. [k.rs](../k.rs)";
    assert_eq!(steps_below(page, "## A"), [("a/f.rs", vec!["T::g", "i"])]);
}

#[test]
fn there_are_no_features_but_those_of_the_design() {
    for package in workspace().workspace_packages() {
        for (name, enables) in &package.features {
            let allowed = FEATURES.iter().any(|(feature, only)| {
                feature == name && only.is_none_or(|only| only.contains(&package.name.as_str()))
            });
            let is_default = name == "default" && enables.iter().all(|it| it == BY_DEFAULT);
            assert!(
                allowed || is_default,
                "{} has the feature {name}: docs/architecture.md allows {FEATURES:?}, and \
                 {BY_DEFAULT} alone by default",
                package.name
            );
        }
    }
}

#[test]
fn the_geometry_the_control_plane_and_the_recorder_have_no_unsafe_code() {
    for path in ["sharding/src/lib.rs", "comm/control/src/lib.rs", "comm/flight/src/lib.rs"] {
        let front_page = sources::rust().into_iter().find(|source| source.path == path);
        let front_page = front_page.expect("a crate has a front page");
        assert!(front_page.text.contains("#![forbid(unsafe_code)]"), "{path}");
    }
}

/// A program depends on `hsdp` and an adapter alone: examples and pages show that they have all
/// names that it needs.
#[test]
fn examples_name_no_crate_below_hsdp() {
    let below = [
        "hsdp_sharding",
        "hsdp_kernels",
        "hsdp_flight",
        "hsdp_comm",
        "hsdp_control",
        "hsdp_checkpoint",
    ];
    let is_shown = |source: &Source| {
        let path = &source.path;
        path.contains("/examples/") || path == "README.md" || path.starts_with("docs/")
    };
    for source in sources::texts().iter().filter(|source| is_shown(source)) {
        for (number, line) in source.lines() {
            let named = below.iter().find(|name| line.contains(**name));
            assert_eq!(named, None, "{}:{number}: `hsdp` has this crate's names", source.path);
        }
    }
}

#[test]
fn nothing_names_a_path_of_somebodys_machine() {
    for source in sources::texts() {
        for (number, line) in source.lines() {
            let found = machine_path(line);
            assert_eq!(found, None, "{}:{number}: this exists on one machine only", source.path);
        }
    }
}

#[test]
fn a_path_of_a_machine_is_told_apart_from_a_link() {
    let at = |folder: &str, rest: &str| ["/", folder, "/", rest].concat();
    assert!(machine_path(&at("home", "ada/hsdp")).is_some());
    assert!(machine_path(&format!("cd \"{}\"", at("root", "hsdp"))).is_some());
    assert_eq!(machine_path("https://example.org/home/page and docs/work/plan.md"), None);
}

/// The complaint about a dependency of `from` on `to`, both of this workspace, if it is wrong.
fn what_is_wrong_with(from: &str, to: &str) -> Option<String> {
    let because = "docs/architecture.md says that each crate knows only those before it";
    match (layer(from), layer(to)) {
        (Some(above), Some(below)) if below < above => None,
        _ => Some(format!("{from} depends on {to}, which is not before it: {because}")),
    }
}

fn layer(name: &str) -> Option<usize> {
    LAYERS.iter().position(|layer| layer.contains(&name))
}

/// The dependencies between crates of the workspace, for building, testing or running, as pairs
/// `(from, to)`.
fn edges() -> impl Iterator<Item = (String, String)> {
    let members: Vec<String> =
        members(&workspace()).map(|member| member.name.to_string()).collect();
    all_edges().filter(move |(_, to)| members.contains(to))
}

fn all_edges() -> impl Iterator<Item = (String, String)> {
    let workspace = workspace();
    let of = |member: &Package| {
        let from = member.name.to_string();
        let to = member.dependencies.iter().map(|dependency| dependency.name.clone());
        to.map(move |to| (from.clone(), to)).collect::<Vec<_>>()
    };
    members(&workspace).flat_map(of).collect::<Vec<_>>().into_iter()
}

fn members(workspace: &Metadata) -> impl Iterator<Item = &Package> {
    workspace.workspace_packages().into_iter()
}

fn workspace() -> Metadata {
    let manifest = sources::root().join("Cargo.toml");
    MetadataCommand::new()
        .manifest_path(manifest)
        .no_deps()
        .exec()
        .expect("cargo reads its own manifests")
}

/// The first absolute path in a line that leads into the folders of one machine.
fn machine_path(line: &str) -> Option<String> {
    ["home", "Users", "root", "work"].into_iter().find_map(|folder| {
        let path = format!("/{folder}/");
        let starts = |at: usize| {
            let before = line[..at].chars().next_back();
            !before.is_some_and(|before| before.is_alphanumeric() || "./-_*>)]}".contains(before))
        };
        line.match_indices(&path).any(|(at, _)| starts(at)).then_some(path)
    })
}

/// The tests of this file that read sources read all of them.
#[test]
fn the_sources_are_found() {
    let paths: Vec<Source> = sources::rust();
    for known in ["runtime/src/lib.rs", "tests/tests/sources/architecture.rs"] {
        assert!(paths.iter().any(|source| source.path == known), "{known} is not found");
    }
}
