//! The files that options name to be written, and names that could change the terminal.

use std::fs;
use std::path::Path;
use std::process::Command;

use hsdp_train::testing::{bounded, refusal};

use crate::bounds::limited;
use crate::calibrate::rows;
use crate::folder::Folder;
use crate::program::output;

const STEPS: &str = include_str!("../../../simulator/tests/a100_node_steps.csv");

/// A model of one matrix.
const MODEL: &str = r#"{"units": [{"name": "a", "params": [{"name": "a.w", "shape": [64, 64]}]}]}"#;

const PLAN: [&str; 4] = ["plan", "gpt2-small", "--mesh", "2x2"];
const SIMULATE: [&str; 6] = ["simulate", "gpt2-small", "--mesh", "2x2", "--machine", "a100-node"];
const SEARCH: [&str; 10] = [
    "search",
    "gpt2-small",
    "--ranks",
    "2",
    "--machine",
    "a100-node",
    "--context",
    "128",
    "--batch-tokens",
    "any",
];

/// Returns a folder with a table of steps, `steps.csv`.
fn with_steps() -> Folder {
    let folder = Folder::new();
    folder.file("steps.csv", &rows(STEPS, |row| row.starts_with("2,")));
    folder
}

/// Returns the commands that write a file, with its name.
fn commands<'a>(steps: &'a str, file: &'a str) -> [Vec<&'a str>; 5] {
    [
        [&PLAN[..], &["--svg", file]].concat(),
        [&PLAN[..], &["--schedules", file]].concat(),
        [&SIMULATE[..], &["--trace", file]].concat(),
        [&SEARCH[..], &["--html", file]].concat(),
        vec!["calibrate", "--steps", steps, "--out", file],
    ]
}

/// Returns the names in a folder, in order.
fn names(folder: &Folder) -> Vec<String> {
    let files = fs::read_dir(folder.path()).expect("a folder").flatten();
    let mut names: Vec<_> = files.map(|it| it.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

#[test]
fn an_output_that_cannot_be_written_is_refused_before_the_work() {
    let folder = with_steps();
    let fifo = folder.at("fifo");
    assert!(Command::new("mkfifo").arg(&fifo).status().expect("it starts").success());
    fs::create_dir(folder.at("there")).expect("made");
    for (file, problem) in [
        (&*fifo, "it is a FIFO; a regular file is needed"),
        (&folder.at("there"), "it is a directory; a regular file is needed"),
        ("/dev/full", "it is a device; a regular file is needed"),
        (&folder.at("none/file"), "No such file or directory (os error 2)"),
        (&folder.at("steps.csv/file"), "Not a directory (os error 20)"),
    ] {
        for command in commands(&folder.at("steps.csv"), file) {
            let error = refusal(&mut limited(&command));
            assert_eq!(error, format!("hsdp: cannot write {file}: {problem}\n"), "{command:?}");
        }
    }
    assert_eq!(names(&folder), ["fifo", "steps.csv", "there"], "nothing is left behind");
}

/// The limit of a file's size, as a full disk would be. Without a signal it is an error.
#[test]
fn a_disk_that_is_full_at_the_end_leaves_what_was_there() {
    let folder = with_steps();
    let full = |command: &[&str]| {
        let script = "trap '' XFSZ; ulimit -f 0; exec \"$0\" \"$@\"";
        let mut full = Command::new("sh");
        refusal(full.args(["-c", script, env!("CARGO_BIN_EXE_hsdp")]).args(command))
    };
    let old = folder.at("old");
    for command in commands(&folder.at("steps.csv"), &old) {
        fs::write(&old, "old").expect("written");
        let expected = format!("hsdp: cannot write {old}: File too large (os error 27)\n");
        assert_eq!(full(&command), expected, "{command:?}");
        assert_eq!(fs::read_to_string(&old).expect("there"), "old");
        assert_eq!(names(&folder), ["old", "steps.csv"], "nothing is left behind");
    }
    let chakra = folder.at("chakra");
    let expected =
        format!("hsdp: cannot write {chakra}/groups.json: File too large (os error 27)\n");
    assert_eq!(full(&[&SIMULATE[..], &["--chakra", &chakra]].concat()), expected);
    assert_eq!(names(&folder), ["old", "steps.csv"], "nothing is left behind");
}

#[test]
fn an_input_is_no_output() {
    let folder = with_steps();
    let steps = folder.at("steps.csv");
    let error = refusal(&mut limited(&["calibrate", "--steps", &steps, "--out", &steps]));
    let expected =
        format!("hsdp: cannot write {steps}: it is an input, {steps}, and would be overwritten\n");
    assert_eq!(error, expected);
    assert!(fs::read_to_string(&steps).expect("there").starts_with("gpus,"));
    let model = folder.file("model.json", MODEL);
    let error = refusal(&mut limited(&["plan", &model, "--mesh", "1x2", "--svg", &model]));
    assert!(error.contains(": it is an input, "), "{error}");
    assert_eq!(fs::read_to_string(&model).expect("there"), MODEL);
    let file = folder.at("file");
    let error =
        refusal(&mut limited(&[&PLAN[..], &["--svg", &file, "--schedules", &file]].concat()));
    assert!(error.ends_with(": it is named twice, and has room for one output\n"), "{error}");
    assert!(!Path::new(&file).exists());
    let error =
        refusal(&mut limited(&[&SIMULATE[..], &["--trace", &file, "--chakra", &file]].concat()));
    assert!(error.ends_with(": it is named twice, and has room for one output\n"), "{error}");
    assert!(!Path::new(&file).exists());
    let error = refusal(&mut limited(&[&SIMULATE[..], &["--chakra", &steps]].concat()));
    assert_eq!(error, format!("hsdp: cannot write {steps}: entity already exists\n"));
}

#[test]
fn stdout_and_the_null_device_are_written_as_they_are() {
    let folder = Folder::new();
    for (file, has_picture) in [("/dev/stdout", true), ("/dev/null", false)] {
        let (code, said, _) = output(&mut limited(&[&PLAN[..], &["--svg", file]].concat()));
        assert_eq!((code, said.contains("<svg ")), (Some(0), has_picture));
        assert!(said.contains("gpt2-small: "), "{said}");
    }
    // Into a file, after which the tables come.
    let file = fs::File::create(folder.at("said")).expect("made");
    let mut plan = limited(&[&PLAN[..], &["--svg", "/dev/stdout"]].concat());
    assert!(plan.stdout(file).status().expect("it starts").success());
    let said = fs::read_to_string(folder.at("said")).expect("there");
    assert!(said.starts_with("<svg ") && said.contains("gpt2-small: "), "{said}");
}

#[test]
fn a_stream_has_room_for_one_output() {
    let folder = with_steps();
    let json = "it is stdout, to which another output goes";
    for (command, problem) in [
        (
            [&PLAN[..], &["--svg", "/dev/stdout", "--schedules", "/dev/stdout"]].concat(),
            "it is named twice, and has room for one output",
        ),
        ([&PLAN[..], &["--json", "--svg", "/dev/stdout"]].concat(), json),
        ([&PLAN[..], &["--json", "--schedules", "/dev/stdout"]].concat(), json),
        ([&SIMULATE[..], &["--json", "--trace", "/dev/stdout"]].concat(), json),
        ([&SEARCH[..], &["--json", "--html", "/dev/stdout"]].concat(), json),
    ] {
        let error = refusal(&mut limited(&command));
        assert_eq!(error, format!("hsdp: cannot write /dev/stdout: {problem}\n"), "{command:?}");
    }
    let both = [&PLAN[..], &["--svg", "/dev/stderr", "--schedules", "/dev/stderr"]].concat();
    let error = refusal(&mut limited(&both));
    assert!(error.ends_with("/dev/stderr: it is named twice, and has room for one output\n"));
    let apart = ["--json", "--svg", "/dev/null", "--schedules", "/dev/null"];
    let text = said(&mut limited(&[&PLAN[..], &apart].concat()));
    assert!(serde_json::from_str::<serde_json::Value>(&text).is_ok(), "{text}");
    // The redirected stdout is a file, by whatever name.
    let path = folder.at("said");
    let file = fs::File::create(&path).expect("made");
    let mut plan = limited(&[&PLAN[..], &["--json", "--svg", &path]].concat());
    let (_, _, error) = output(plan.stdout(file));
    assert_eq!(error, format!("hsdp: cannot write {path}: {json}\n"));
}

/// Runs in a mount namespace, which some systems do not permit.
#[test]
fn a_mount_point_is_refused_before_the_work() {
    let folder = with_steps();
    let [old, mounted] = ["old", "mounted"].map(|name| folder.at(name));
    for file in [&old, &mounted] {
        fs::write(file, "old").expect("written");
    }
    let mount = |script: &str| {
        let mut command = bounded("unshare");
        command.args(["--user", "--map-root-user", "--mount", "sh", "-c", script, "sh"]);
        command.args([&mounted, &old]);
        command
    };
    let probe = mount("mount --bind \"$1\" \"$2\"").output();
    if !probe.is_ok_and(|it| it.status.success()) {
        eprintln!("this system permits no mounts, so the test checks nothing");
        return;
    }
    let script = "mount --bind \"$1\" \"$2\" && shift 2 && exec \"$@\"";
    for command in commands(&folder.at("steps.csv"), &old) {
        let mut mounted = mount(script);
        let error = refusal(mounted.arg(env!("CARGO_BIN_EXE_hsdp")).args(&command));
        let problem = "it is a mount point, which cannot be replaced";
        assert_eq!(error, format!("hsdp: cannot write {old}: {problem}\n"), "{command:?}");
    }
    assert_eq!(names(&folder), ["mounted", "old", "steps.csv"], "nothing is left behind");
}

/// Returns the text of a command that succeeds.
fn said(command: &mut Command) -> String {
    let (code, text, error) = output(command);
    assert_eq!(code, Some(0), "{error}");
    text
}

#[test]
fn names_in_files_do_not_change_the_terminal() {
    let folder = with_steps();
    let [model, machine] =
        ["mo\u{1b}[2J\u{9b}\ndel.json", "ma\u{7}chine.toml"].map(|it| folder.at(it));
    fs::write(&model, MODEL).expect("written");
    let bundled = include_str!("../../../simulator/machines/a100-node.toml");
    let named = bundled.replacen("name = \"", "name = \"x\\u001b[2J\\u009by\\nz ", 1);
    assert_ne!(named, bundled);
    fs::write(&machine, named).expect("written");
    let commands: [&[&str]; 3] = [
        &["plan", &model, "--mesh", "1x2"],
        &["simulate", &model, "--mesh", "1x2", "--machine", &machine],
        &[
            "search",
            &model,
            "--ranks",
            "2",
            "--machine",
            &machine,
            "--context",
            "128",
            "--batch-tokens",
            "any",
        ],
    ];
    for command in commands {
        let text = said(&mut limited(command));
        let control = text.chars().find(|it| it.is_control() && *it != '\n');
        assert_eq!(control, None, "{text}");
        assert!(text.contains("mo\\u{1b}[2J\\u{9b}\\ndel.json"), "{text}");
        let text = said(limited(command).arg("--json"));
        assert!(!text.trim_end().chars().any(char::is_control), "{text}");
        let json: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        assert!(json.is_object());
    }
}
