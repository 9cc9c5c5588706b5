//! `hsdp completions`: prints scripts with which shells complete commands and options.

use std::error::Error;

use clap::{Args, Command, CommandFactory as _, ValueEnum};
use clap_complete::{Shell, generate};
use hsdp_train::print;

use crate::{CommandOutcome, ProgramArgs};

/// Options of `hsdp completions`.
#[derive(Args, Debug)]
pub(crate) struct CompletionsArgs {
    /// Shell
    #[arg(value_name = "SHELL")]
    shell: SupportedShell,
}

/// Supported shells.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum SupportedShell {
    /// `hsdp completions bash > /etc/bash_completion.d/hsdp`.
    Bash,
    /// `hsdp completions zsh > "${fpath[1]}/_hsdp"`.
    Zsh,
    /// `hsdp completions fish > ~/.config/fish/completions/hsdp.fish`.
    Fish,
}

/// Prints the script.
pub(crate) fn run(options: &CompletionsArgs) -> Result<CommandOutcome, Box<dyn Error>> {
    let shell = match options.shell {
        SupportedShell::Bash => Shell::Bash,
        SupportedShell::Zsh => Shell::Zsh,
        SupportedShell::Fish => Shell::Fish,
    };
    let mut script = Vec::new();
    generate(shell, &mut shown(), "hsdp", &mut script);
    print(String::from_utf8(script)?)?;
    Ok(CommandOutcome::Well)
}

/// Returns the program without its hidden commands, which scripts would otherwise offer.
fn shown() -> Command {
    let program = ProgramArgs::command();
    let commands = program.get_subcommands().filter(|command| !command.is_hide_set()).cloned();
    Command::new("hsdp").version(env!("CARGO_PKG_VERSION")).subcommands(commands)
}
