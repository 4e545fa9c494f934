//! `device-ipc completions` and `device-ipc man`: what packagers and users install beside the program.

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Command;
use clap_complete::Shell;
use clap_mangen::Man;

use crate::output::{RawOutput, line};

#[derive(clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub(crate) struct Arguments {
    /// Shell to complete for
    shell: Shell,
}

const EXAMPLES: &str = "\
Examples:
  device-ipc completions bash > ~/.local/share/bash-completion/completions/device-ipc
  device-ipc completions zsh > ~/.zfunc/_device-ipc
  device-ipc completions fish > ~/.config/fish/completions/device-ipc.fish";

#[derive(clap::Args)]
pub(crate) struct ManArguments {
    /// Existing directory to write the pages of all commands to
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
}

pub(crate) fn run(arguments: &Arguments, mut command: Command) -> Result<()> {
    let name = command.get_name().to_owned();
    let mut script = Vec::new();
    clap_complete::generate(arguments.shell, &mut command, name, &mut script);
    print(&script)
}

pub(crate) fn run_man(arguments: &ManArguments, command: Command) -> Result<()> {
    if let Some(directory) = &arguments.dir {
        let shown = directory.display();
        clap_mangen::generate_to(command, directory)
            .with_context(|| format!("cannot write manual pages to {shown}"))?;
        return line(format_args!("wrote the manual pages to {shown}"));
    }
    let mut page = Vec::new();
    Man::new(command).render(&mut page)?;
    print(&page)
}

fn print(bytes: &[u8]) -> Result<()> {
    let mut output = RawOutput::create("-".as_ref())?;
    output.write(bytes)?;
    output.finish()
}
