//! The command line: options, or one line about the first error in it.

use std::collections::BTreeSet;
use std::io::{self, Write as _};

use clap::error::ErrorKind;
use clap::{Command, Parser};

use crate::stderr::in_one_line;
use crate::stdout::{PrintError, unless_closed};

/// The reason why a program has no options to run with.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CommandLineError {
    /// An argument is unknown, missing or has an invalid value.
    #[error("{line}")]
    Invalid {
        /// The error, without the advice and the usage that clap adds.
        line: String,
    },
    /// The program is wrong: two of its arguments have one name. clap would use one of them, and
    /// finds this in debug builds only.
    #[error("two options of this program have the name {name}: rename one of them")]
    NameTwice {
        /// The name: `--long`, `-s`, or the argument's id, which is the name of its field.
        name: String,
    },
    /// The help or the version could not be printed.
    #[error(transparent)]
    Print(#[from] PrintError),
}

/// Reads the command line of this process. `--help` and `--version` end the process here, with exit
/// code 0.
///
/// # Errors
/// [`CommandLineError`], whose text is one line.
pub fn read<O: Parser>() -> Result<O, CommandLineError> {
    check_names(&O::command())?;
    O::try_parse().map_err(|error| match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => match show(&error) {
            Ok(()) => std::process::exit(0),
            Err(error) => error.into(),
        },
        // With this kind of error, clap's text is the help.
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            CommandLineError::Invalid { line: "a command is missing; --help lists them".to_owned() }
        }
        _ => CommandLineError::Invalid { line: first_paragraph(&error.to_string()) },
    })
}

/// Refuses two arguments of one command with the same name.
fn check_names(command: &Command) -> Result<(), CommandLineError> {
    let mut names = BTreeSet::new();
    for argument in command.get_arguments() {
        let long = argument.get_long_and_visible_aliases().into_iter().flatten();
        let short = argument.get_short_and_visible_aliases().into_iter().flatten();
        let own = long.map(|name| format!("--{name}")).chain(short.map(|name| format!("-{name}")));
        for name in own.chain([argument.get_id().to_string()]) {
            if let Some(name) = names.replace(name) {
                return Err(CommandLineError::NameTwice { name });
            }
        }
    }
    command.get_subcommands().try_for_each(check_names)
}

fn show(help: &clap::Error) -> Result<(), PrintError> {
    unless_closed(help.print().and_then(|()| io::stdout().flush()))
}

/// Returns the text before the first empty line, as one line. Advice and usage follow that line.
fn first_paragraph(text: &str) -> String {
    let said = text.lines().map(str::trim).take_while(|line| !line.is_empty());
    let line = said.collect::<Vec<_>>().join(" ");
    in_one_line(line.strip_prefix("error: ").unwrap_or(&line))
}

#[cfg(test)]
mod tests {
    use clap::{Args, CommandFactory as _, Parser, Subcommand};

    use super::{check_names, first_paragraph};
    use crate::options::{EvaluationOptions, RunOptions};

    #[derive(Args)]
    struct Renamed {
        #[arg(id = "own-keep", long = "keep")]
        keep: bool,
    }

    #[derive(Args)]
    struct Short {
        #[arg(short)]
        keeping: bool,
        #[arg(short, long)]
        knows: bool,
    }

    #[derive(Args)]
    struct Field {
        #[arg(long = "keep-all")]
        keep: bool,
    }

    #[derive(Args)]
    struct Other {
        #[arg(short, long)]
        data: Option<String>,
    }

    #[derive(Parser)]
    struct With<A: Args> {
        #[command(flatten)]
        run: RunOptions,
        #[command(flatten)]
        evaluation: EvaluationOptions,
        #[command(flatten)]
        own: A,
    }

    #[derive(Parser)]
    struct Commands {
        #[command(subcommand)]
        command: Work,
    }

    #[derive(Subcommand)]
    enum Work {
        Plan(Other),
        Train(With<Renamed>),
    }

    #[test]
    fn two_options_with_one_name_are_refused() {
        let refusal =
            |command| check_names(&command).expect_err("a name is there twice").to_string();
        let expected =
            |name| format!("two options of this program have the name {name}: rename one of them");
        assert_eq!(refusal(With::<Renamed>::command()), expected("--keep"));
        assert_eq!(refusal(With::<Short>::command()), expected("-k"));
        assert_eq!(refusal(With::<Field>::command()), expected("keep"));
        assert_eq!(refusal(Commands::command()), expected("--keep"));
        check_names(&With::<Other>::command()).expect("all names differ");
    }

    #[test]
    fn advice_and_usage_are_left_out() {
        let text =
            "error: the following arguments were not provided:\n  <A>\n\nUsage: program <A>\n";
        assert_eq!(first_paragraph(text), "the following arguments were not provided: <A>");
        assert_eq!(
            first_paragraph("error: invalid value '\u{1b}[2J'"),
            "invalid value '\\u{1b}[2J'"
        );
    }
}
