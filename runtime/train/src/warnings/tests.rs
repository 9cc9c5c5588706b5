use std::fs;
use std::io;

use indicatif::{ProgressDrawTarget, ProgressStyle, TermLike};
use serde_json::Value;
use tracing::subscriber::with_default;

use super::*;

/// Runs `work` and returns its warnings.
fn warnings_of(work: impl FnOnce(&Warnings)) -> Warnings {
    let warnings = Warnings::of("test");
    with_default(Registry::default().with(warnings.layer()), || work(&warnings));
    warnings
}

fn lines(file: &Path) -> Vec<Value> {
    let text = fs::read_to_string(file).unwrap_or_default();
    text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

#[test]
fn a_warning_that_repeats_is_counted_and_not_shown() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("warnings.jsonl");
    let warnings = warnings_of(|warnings| {
        warnings.keep_in(&file);
        for step in 0..5000 {
            hsdp_warnings::warn!("the same");
            hsdp_warnings::warn!(step, "one of a kind");
        }
        hsdp_warnings::error!("another");
    });
    assert_eq!(warnings.count(), 10_001);
    let messages: Vec<_> = lines(&file).iter().map(|line| line["message"].clone()).collect();
    let many = messages.iter().filter(|message| *message == "one of a kind").count();
    assert_eq!((messages.len(), many), (12, 10), "{messages:?}");
    assert_eq!(messages[11], "another");
}

#[test]
fn a_kind_is_shown_again_after_a_minute_with_the_number_left_out() {
    let mut repeats = Repeats::default();
    let begun = Instant::now();
    let mut at = |seconds| {
        let now = begun + std::time::Duration::from_secs(seconds);
        repeats.admit("a kind", "the same", now)
    };
    assert_eq!([0, 1, 59, 61, 62, 130].map(&mut at), [Some(0), None, None, Some(2), None, Some(1)]);
}

#[test]
fn the_number_left_out_is_told_with_the_next_text_too() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("warnings.jsonl");
    warnings_of(|warnings| {
        warnings.keep_in(&file);
        for step in [1, 1, 1, 2, 3] {
            hsdp_warnings::warn!(step, "late");
        }
    });
    let told: Vec<_> = lines(&file).iter().map(|line| line["left_out"].clone()).collect();
    assert_eq!(told, [0, 2, 0]);
}

#[test]
fn warnings_before_the_file_is_named_are_in_it_and_those_of_an_earlier_run_stay() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("warnings.jsonl");
    for run in 0..2 {
        warnings_of(|warnings| {
            warnings.set_rank(3);
            hsdp_warnings::warn!(run, "before");
            warnings.keep_in(&file);
            hsdp_warnings::warn!("after");
            tracing::info!("no warning");
        });
    }
    let lines = lines(&file);
    let messages: Vec<_> = lines.iter().map(|line| line["message"].clone()).collect();
    assert_eq!(messages, ["before", "after", "before", "after"]);
    assert_eq!([&lines[2]["fields"]["run"], &lines[2]["level"]], ["1", "WARN"]);
    assert_eq!(lines[2]["rank"], 3);
}

#[test]
fn no_file_is_made_without_a_warning() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("warnings.jsonl");
    warnings_of(|warnings| warnings.keep_in(&file));
    assert!(!file.exists());
}

#[test]
fn a_warning_is_one_line_of_bounded_length() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("warnings.jsonl");
    warnings_of(|warnings| {
        warnings.keep_in(&file);
        hsdp_warnings::warn!(peer = "a\nb\x1b[2J", long = "x".repeat(1 << 20), "refused");
    });
    let fields = &lines(&file)[0]["fields"];
    assert_eq!(fields["peer"], "a\\nb\\u{1b}[2J");
    assert_eq!(fields["long"].as_str().map(str::len), Some(1003));
}

#[test]
fn a_file_that_cannot_be_written_does_not_stop_the_warnings() {
    let folder = tempfile::tempdir().expect("a folder");
    let warnings = warnings_of(|warnings| {
        warnings.keep_in(&folder.path().join("missing").join("warnings.jsonl"));
        (0..3).for_each(|step| hsdp_warnings::warn!(step, "one"));
    });
    assert_eq!(warnings.count(), 3);
}

/// Opening a FIFO blocks until it has a reader, unless the flags forbid it.
#[test]
fn a_fifo_in_the_place_of_the_file_holds_nothing_up() {
    use rustix::fs::{CWD, FileType, Mode, OFlags};

    let folder = tempfile::tempdir().expect("a folder");
    let fifo = folder.path().join("warnings.jsonl");
    let mode = Mode::from_raw_mode(0o600);
    rustix::fs::mknodat(CWD, &fifo, FileType::Fifo, mode, 0).expect("a FIFO");
    let (done, ended) = std::sync::mpsc::channel();
    let name = fifo.clone();
    let warn = move || {
        let warnings = warnings_of(|warnings| {
            warnings.keep_in(&name);
            hsdp_warnings::warn!("one");
        });
        let _ = done.send(warnings.count());
    };
    std::thread::spawn(warn.clone());
    let patience = std::time::Duration::from_secs(20);
    assert_eq!(ended.recv_timeout(patience), Ok(1), "nothing reads the FIFO");
    let flags = OFlags::RDONLY | OFlags::NONBLOCK;
    let reader = rustix::fs::open(&fifo, flags, Mode::empty()).expect("a reader");
    warn();
    let mut read = [0; 8];
    assert_eq!(rustix::io::read(&reader, &mut read).expect("no writer"), 0, "nothing is written");
}

/// A terminal that records the operations of a progress bar.
#[derive(Clone, Debug, Default)]
struct Terminal(Arc<Mutex<Vec<String>>>);

impl Terminal {
    fn note(&self, done: &str) -> io::Result<()> {
        self.0.lock().push(done.to_owned());
        Ok(())
    }
}

impl TermLike for Terminal {
    fn width(&self) -> u16 {
        80
    }

    fn move_cursor_up(&self, _: usize) -> io::Result<()> {
        Ok(())
    }

    fn move_cursor_down(&self, _: usize) -> io::Result<()> {
        Ok(())
    }

    fn move_cursor_right(&self, _: usize) -> io::Result<()> {
        Ok(())
    }

    fn move_cursor_left(&self, _: usize) -> io::Result<()> {
        Ok(())
    }

    fn write_line(&self, text: &str) -> io::Result<()> {
        self.note(text)
    }

    fn write_str(&self, text: &str) -> io::Result<()> {
        self.note(text)
    }

    fn clear_line(&self) -> io::Result<()> {
        self.note("cleared")
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_progress_bar_is_cleared_before_a_warning_and_drawn_after_it() {
    let terminal = Terminal::default();
    let target = ProgressDrawTarget::term_like_with_hz(Box::new(terminal.clone()), u8::MAX);
    let style = ProgressStyle::with_template("the bar").expect("a template");
    let bar = ProgressBar::with_draw_target(Some(2), target).with_style(style);
    let done = || std::mem::take(&mut *terminal.0.lock()).concat().trim().to_owned();
    warnings_of(|warnings| {
        warnings.show_beside(&bar);
        bar.tick();
        assert_eq!(done(), "the bar");
        hsdp_warnings::warn!("beside the bar");
        assert_eq!(done(), "clearedthe bar");
        bar.finish();
        done();
        hsdp_warnings::warn!("after the bar");
        assert_eq!(done(), "", "a finished bar is left alone");
    });
}
