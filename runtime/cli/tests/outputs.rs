//! The files that options name to be written, and names that could change the terminal.
#![cfg(unix)]

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use hsdp_train::testing::{bounded, refusal};
use tempfile::TempDir;

const STEPS: &str = include_str!("../../simulator/tests/a100_node_steps.csv");

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

fn hsdp(arguments: &[&str]) -> Command {
    let mut command = bounded(env!("CARGO_BIN_EXE_hsdp"));
    command.args(arguments);
    command
}

/// A folder with a table of steps, in which commands run.
struct Folder(TempDir);

impl Folder {
    fn new() -> Self {
        let folder = TempDir::new().expect("a folder");
        let few = STEPS.lines().filter(|line| line.starts_with("gpus,") || line.starts_with("2,"));
        let few: String = few.map(|line| line.to_owned() + "\n").collect();
        fs::write(folder.path().join("steps.csv"), few).expect("written");
        Self(folder)
    }

    fn at(&self, name: &str) -> String {
        self.0.path().join(name).display().to_string()
    }

    /// The commands that write a file, up to its name.
    fn commands(&self) -> Vec<Vec<String>> {
        let steps = self.at("steps.csv");
        let calibrate = ["calibrate", "--steps", &steps, "--out"];
        [
            [&PLAN[..], &["--svg"]].concat(),
            [&PLAN[..], &["--schedules"]].concat(),
            [&SIMULATE[..], &["--trace"]].concat(),
            [&SEARCH[..], &["--html"]].concat(),
            calibrate.to_vec(),
        ]
        .into_iter()
        .map(|command| command.into_iter().map(str::to_owned).collect())
        .collect()
    }

    fn names(&self) -> Vec<String> {
        let files = fs::read_dir(self.0.path()).expect("a folder").flatten();
        files.map(|it| it.file_name().to_string_lossy().into_owned()).collect()
    }
}

fn with<'a>(command: &'a [String], file: &'a str) -> Vec<&'a str> {
    command.iter().map(String::as_str).chain([file]).collect()
}

#[test]
fn an_output_that_cannot_be_written_is_refused_before_the_work() {
    let folder = Folder::new();
    let fifo = folder.at("fifo");
    assert!(Command::new("mkfifo").arg(&fifo).status().expect("it starts").success());
    fs::create_dir(folder.at("there")).expect("made");
    for command in folder.commands() {
        for (file, problem) in [
            (&*fifo, "it is a FIFO; a regular file is needed"),
            (&folder.at("there"), "it is a directory; a regular file is needed"),
            ("/dev/full", "it is a device; a regular file is needed"),
            (&folder.at("none/file"), "No such file or directory (os error 2)"),
            (&folder.at("steps.csv/file"), "Not a directory (os error 20)"),
        ] {
            let error = refusal(&mut hsdp(&with(&command, file)));
            assert_eq!(error, format!("hsdp: cannot write {file}: {problem}\n"), "{command:?}");
        }
    }
    let mut names = folder.names();
    names.sort();
    assert_eq!(names, ["fifo", "steps.csv", "there"], "nothing is left behind");
}

/// The limit of a file's size, as a full disk would be. Without a signal it is an error.
#[test]
fn a_disk_that_is_full_at_the_end_leaves_what_was_there() {
    let folder = Folder::new();
    let old = folder.at("old");
    for command in folder.commands() {
        fs::write(&old, "old").expect("written");
        let mut limited = Command::new("sh");
        let script = "trap '' XFSZ; ulimit -f 0; exec \"$0\" \"$@\"";
        limited.args(["-c", script, env!("CARGO_BIN_EXE_hsdp")]).args(with(&command, &old));
        let error = refusal(&mut limited);
        let expected = format!("hsdp: cannot write {old}: File too large (os error 27)\n");
        assert_eq!(error, expected, "{command:?}");
        assert_eq!(fs::read_to_string(&old).expect("there"), "old");
        assert_eq!(folder.names().len(), 2, "nothing is left behind");
    }
    let chakra = folder.at("chakra");
    let mut limited = Command::new("sh");
    limited.args(["-c", "trap '' XFSZ; ulimit -f 0; exec \"$0\" \"$@\""]);
    limited.arg(env!("CARGO_BIN_EXE_hsdp")).args(SIMULATE).args(["--chakra", &chakra]);
    let expected =
        format!("hsdp: cannot write {chakra}/groups.json: File too large (os error 27)\n");
    assert_eq!(refusal(&mut limited), expected);
    assert_eq!(folder.names().len(), 2, "nothing is left behind");
}

#[test]
fn an_input_is_no_output() {
    let folder = Folder::new();
    let steps = folder.at("steps.csv");
    let error = refusal(&mut hsdp(&["calibrate", "--steps", &steps, "--out", &steps]));
    let expected =
        format!("hsdp: cannot write {steps}: it is an input, {steps}, and would be overwritten\n");
    assert_eq!(error, expected);
    assert!(fs::read_to_string(&steps).expect("there").starts_with("gpus,"));
    let model = folder.at("model.json");
    let text = r#"{"units": [{"name": "a", "params": [{"name": "a.w", "shape": [64, 64]}]}]}"#;
    fs::write(&model, text).expect("written");
    let error = refusal(&mut hsdp(&["plan", &model, "--mesh", "1x2", "--svg", &model]));
    assert!(error.contains(": it is an input, "), "{error}");
    assert_eq!(fs::read_to_string(&model).expect("there"), text);
    let file = folder.at("file");
    let error = refusal(&mut hsdp(&[&PLAN[..], &["--svg", &file, "--schedules", &file]].concat()));
    assert!(error.ends_with(": it is named twice, and has room for one output\n"), "{error}");
    assert!(!Path::new(&file).exists());
    let error =
        refusal(&mut hsdp(&[&SIMULATE[..], &["--trace", &file, "--chakra", &file]].concat()));
    assert!(error.ends_with(": it is named twice, and has room for one output\n"), "{error}");
    assert!(!Path::new(&file).exists());
    let error = refusal(&mut hsdp(&[&SIMULATE[..], &["--chakra", &steps]].concat()));
    assert_eq!(error, format!("hsdp: cannot write {steps}: entity already exists\n"));
}

#[test]
fn stdout_and_the_null_device_are_written_as_they_are() {
    let folder = Folder::new();
    for (file, has_picture) in [("/dev/stdout", true), ("/dev/null", false)] {
        let output = hsdp(&[&PLAN[..], &["--svg", file]].concat()).output().expect("it starts");
        let said = String::from_utf8(output.stdout).expect("UTF-8");
        assert_eq!((output.status.code(), said.contains("<svg ")), (Some(0), has_picture));
        assert!(said.contains("gpt2-small: "), "{said}");
    }
    // Into a file, after which the tables come.
    let file = fs::File::create(folder.at("said")).expect("made");
    let mut plan = hsdp(&[&PLAN[..], &["--svg", "/dev/stdout"]].concat());
    assert!(plan.stdout(file).status().expect("it starts").success());
    let said = fs::read_to_string(folder.at("said")).expect("there");
    assert!(said.starts_with("<svg ") && said.contains("gpt2-small: "), "{said}");
}

#[test]
fn a_stream_has_room_for_one_output() {
    let folder = Folder::new();
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
        let error = refusal(&mut hsdp(&command));
        assert_eq!(error, format!("hsdp: cannot write /dev/stdout: {problem}\n"), "{command:?}");
    }
    let both = [&PLAN[..], &["--svg", "/dev/stderr", "--schedules", "/dev/stderr"]].concat();
    let error = refusal(&mut hsdp(&both));
    assert!(error.ends_with("/dev/stderr: it is named twice, and has room for one output\n"));
    let apart = ["--json", "--svg", "/dev/null", "--schedules", "/dev/null"];
    let text = said(&mut hsdp(&[&PLAN[..], &apart].concat()));
    assert!(serde_json::from_str::<serde_json::Value>(&text).is_ok(), "{text}");
    // The redirected stdout is a file, by whatever name.
    let path = folder.at("said");
    let file = fs::File::create(&path).expect("made");
    let mut plan = hsdp(&[&PLAN[..], &["--json", "--svg", &path]].concat());
    let output = plan.stdout(file).output().expect("it starts");
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(error, format!("hsdp: cannot write {path}: {json}\n"));
}

/// Runs in a mount namespace, which some systems do not permit.
#[cfg(target_os = "linux")]
#[test]
fn a_mount_point_is_refused_before_the_work() {
    let folder = Folder::new();
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
    for command in folder.commands() {
        let mut command_on_mount = mount(script);
        command_on_mount.arg(env!("CARGO_BIN_EXE_hsdp")).args(with(&command, &old));
        let error = refusal(&mut command_on_mount);
        let problem = "it is a mount point, which cannot be replaced";
        assert_eq!(error, format!("hsdp: cannot write {old}: {problem}\n"), "{command:?}");
    }
    assert_eq!(folder.names().len(), 3, "nothing is left behind");
}

/// Returns the text of a command that succeeds.
fn said(command: &mut Command) -> String {
    let Output { status, stdout, stderr } = command.output().expect("it starts");
    assert!(status.success(), "{}", String::from_utf8_lossy(&stderr));
    String::from_utf8(stdout).expect("UTF-8")
}

#[test]
fn names_in_files_do_not_change_the_terminal() {
    let folder = Folder::new();
    let [model, machine] =
        ["mo\u{1b}[2J\u{9b}\ndel.json", "ma\u{7}chine.toml"].map(|it| folder.at(it));
    let text = r#"{"units": [{"name": "a", "params": [{"name": "a.w", "shape": [64, 64]}]}]}"#;
    fs::write(&model, text).expect("written");
    let bundled = include_str!("../../simulator/machines/a100-node.toml");
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
        let text = said(&mut hsdp(command));
        let control = text.chars().find(|it| it.is_control() && *it != '\n');
        assert_eq!(control, None, "{text}");
        assert!(text.contains("mo\\u{1b}[2J\\u{9b}\\ndel.json"), "{text}");
        let text = said(hsdp(command).arg("--json"));
        assert!(!text.trim_end().chars().any(char::is_control), "{text}");
        let json: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        assert!(json.is_object());
    }
}
