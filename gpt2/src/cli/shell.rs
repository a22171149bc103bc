//! Completions of shells and manual pages, made from the description of a program's command line.

use std::fs;
use std::path::PathBuf;

use clap::{Args, Command};
use clap_complete::Shell;

use super::CliError;

/// Print a shell's completion script.
#[derive(Debug, Args)]
pub struct CompletionsArgs {
    /// The shell.
    shell: Shell,
}

/// Write a manual page for each command.
#[derive(Debug, Args)]
pub struct ManArgs {
    /// Folder for the pages; it is created if it does not exist. `man -l FOLDER/PAGE` shows a page.
    folder: PathBuf,
}

impl CompletionsArgs {
    /// Prints the completions of the program `command`, without commands that it hides.
    pub fn run(&self, command: &Command) {
        let (mut text, mut shown) = (Vec::new(), without_hidden(command));
        clap_complete::generate(self.shell, &mut shown, command.get_name(), &mut text);
        super::say(String::from_utf8_lossy(&text).trim_end());
    }
}

impl ManArgs {
    /// Writes the pages of the program `command`, without commands that it hides.
    ///
    /// # Errors
    /// The folder cannot be written to.
    pub fn run(&self, command: &Command) -> Result<(), CliError> {
        let folder = self.folder.display();
        let told = |error: std::io::Error| format!("{folder}: {error}; give a folder that can be written");
        fs::create_dir_all(&self.folder).map_err(told)?;
        clap_mangen::generate_to(command.clone(), &self.folder).map_err(told)?;
        super::say(format_args!("manual pages: {folder}"));
        Ok(())
    }
}

/// The command with only those of its commands that a user is meant to see: completions are made of all that there are.
fn without_hidden(command: &Command) -> Command {
    let shown = command.get_subcommands().filter(|each| !each.is_hide_set()).map(without_hidden);
    let mut bare = Command::new(command.get_name().to_string()).args(command.get_arguments()).subcommands(shown);
    if let Some(about) = command.get_about() {
        bare = bare.about(about.clone());
    }
    if let Some(version) = command.get_version() {
        bare = bare.version(version.to_string());
    }
    bare
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command() -> Command {
        let hidden = Command::new("serve").hide(true);
        let train =
            Command::new("train").about("Trains a model").arg(clap::arg!(--strategy <NAME> "How ranks share a step"));
        Command::new("program").about("A program").version("1.2.3").subcommands([train, hidden])
    }

    #[test]
    fn a_page_for_each_command_that_is_shown() {
        let folder = tempfile::tempdir().unwrap();
        ManArgs { folder: folder.path().join("man1") }.run(&command()).unwrap();
        let names = |entry: std::io::Result<fs::DirEntry>| entry.unwrap().file_name().into_string().unwrap();
        let mut pages: Vec<String> = fs::read_dir(folder.path().join("man1")).unwrap().map(names).collect();
        pages.sort_unstable();
        assert_eq!(pages, ["program-train.1", "program.1"]);
        let page = fs::read_to_string(folder.path().join("man1/program-train.1")).unwrap();
        assert!(page.contains("How ranks share a step") && page.contains("strategy"), "{page}");
        let error = ManArgs { folder: "/dev/null/man".into() }.run(&command()).unwrap_err().to_string();
        assert!(error.contains("/dev/null/man"), "{error}");
    }

    #[test]
    fn every_shell_completes_what_is_shown_and_nothing_else() {
        for shell in [Shell::Bash, Shell::Elvish, Shell::Fish, Shell::PowerShell, Shell::Zsh] {
            let (mut text, mut shown) = (Vec::new(), without_hidden(&command()));
            clap_complete::generate(shell, &mut shown, "program", &mut text);
            let text = String::from_utf8(text).unwrap();
            assert!(text.contains("train") && text.contains("strategy") && !text.contains("serve"), "{shell}: {text}");
        }
    }
}
