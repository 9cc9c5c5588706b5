//! `hsdp completions`: prints scripts with which shells complete commands and options.

use std::error::Error;

use clap::{Args, Command, CommandFactory as _};
use clap_complete::{Shell, generate};
use hsdp_train::print;

use crate::{CommandOutcome, ProgramArgs};

/// Options of `hsdp completions`.
#[derive(Args, Debug)]
pub(crate) struct CompletionsArgs {
    /// Shell; the script of bash belongs into /etc/bash_completion.d/hsdp, that of zsh into
    /// "${fpath[1]}/_hsdp", and that of fish into ~/.config/fish/completions/hsdp.fish
    #[arg(value_name = "SHELL")]
    shell: Shell,
}

/// Prints the script.
pub(crate) fn run(options: &CompletionsArgs) -> Result<CommandOutcome, Box<dyn Error>> {
    let mut script = Vec::new();
    generate(options.shell, &mut shown(), "hsdp", &mut script);
    print(String::from_utf8(script)?)?;
    Ok(CommandOutcome::Well)
}

/// Returns the program without its hidden commands, which scripts would otherwise offer.
fn shown() -> Command {
    let program = ProgramArgs::command();
    let commands = program.get_subcommands().filter(|command| !command.is_hide_set()).cloned();
    Command::new("hsdp").version(env!("CARGO_PKG_VERSION")).subcommands(commands)
}
