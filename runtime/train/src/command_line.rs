//! The command line: options, or one line about the first error in it.

use std::io::{self, Write as _};

use clap::Parser;
use clap::error::ErrorKind;

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
    use super::first_paragraph;

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
