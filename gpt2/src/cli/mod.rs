//! The command line of the program `gpt2`.

mod attempts;
mod convert;
mod data;
mod devices;
mod eval;
mod folder;
mod loading;
mod metrics;
mod model;
mod progress;
mod sample;
mod settings;
mod shell;
mod summary;
mod train;

use std::fmt;
use std::process::ExitCode;

use clap::{FromArgMatches, Parser, Subcommand};
use comm_core::{printer, process};

pub use shell::{CompletionsArgs, ManArgs};

/// Trains GPT-2 with any distributed strategy over any transport.
#[derive(Debug, Parser)]
#[command(name = "gpt2", version, about)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Train a model, on one or several processes.
    Train(Box<train::TrainArgs>),
    /// Write text with a trained model.
    Sample(sample::SampleArgs),
    /// Measure a trained model on a text or on HellaSwag.
    Eval(eval::EvalArgs),
    /// Make token shards for `gpt2 train --data` of text, JSON lines or Parquet, of any size.
    Data(data::DataArgs),
    /// Save a GPT-2 of this program or of Hugging Face's transformers so that both open it.
    Convert(convert::ConvertArgs),
    /// List what this machine and this build have to compute with, and why what is missing is missing.
    Devices(devices::DevicesArgs),
    Completions(CompletionsArgs),
    Man(ManArgs),
}

/// Runs the program; errors go to standard error, one line each. A program with a transport of its own calls [`isocomm::register`] first, and
/// then this: see `bench/examples/own_transport.rs`.
pub fn main() -> ExitCode {
    let _printed = printer::at_end();
    process::prepare();
    // Before any other thread; without it each step pays for fresh pages.
    crate::sys::keep_freed_pages();
    if let Err(error) = isocomm::prepare() {
        complain(format_args!("error: {error}"));
        return ExitCode::FAILURE;
    }
    let arguments = match settings::with_file(std::env::args_os().collect()) {
        Ok(arguments) => arguments,
        Err(error) => {
            complain(format_args!("error: {error}"));
            return ExitCode::FAILURE;
        }
    };
    let matches = settings::command().get_matches_from(&arguments);
    let cli = Cli::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
    let result = match cli.command {
        Command::Train(args) => Ok(train::run(&args, arguments.into_iter().skip(1).collect())),
        Command::Sample(args) => sample::run(&args).map(|()| ExitCode::SUCCESS),
        Command::Eval(args) => eval::run(&args).map(|()| ExitCode::SUCCESS),
        Command::Data(args) => data::run(&args).map(|()| ExitCode::SUCCESS),
        Command::Convert(args) => convert::run(&args).map(|()| ExitCode::SUCCESS),
        Command::Devices(args) => devices::run(args).map(|()| ExitCode::SUCCESS),
        Command::Completions(args) => {
            args.run(&settings::command());
            Ok(ExitCode::SUCCESS)
        }
        Command::Man(args) => args.run(&settings::command()).map(|()| ExitCode::SUCCESS),
    };
    result.unwrap_or_else(|error| {
        complain(format_args!("error: {error}"));
        ExitCode::FAILURE
    })
}

/// Most ranks that are started on one machine.
pub const MAX_RANKS_HERE: usize = 1024;

/// Most threads that compute in a rank.
pub const MAX_THREADS: usize = 1024;

/// Prints a line to standard output. A reader that has gone (`gpt2 train | head`), one that reads nothing, or a full disk must not end or hold
/// up a run, so unlike `println!` this neither panics nor waits: see [`printer`], and there what a program has to do at its end.
pub fn say(text: impl fmt::Display) {
    printer::stdout().line(text);
}

/// As [`say`], to standard error.
pub fn complain(text: impl fmt::Display) {
    printer::stderr().line(text);
}

/// What a command fails with: one message for the user.
type CliError = Box<dyn std::error::Error + Send + Sync>;

#[cfg(test)]
mod tests {
    use std::ffi::OsString;
    use std::fs;

    /// Every `cargo run … -p gpt2 … -- …` of the README and the book.
    #[test]
    fn the_commands_of_readme_and_book_are_commands() {
        let root = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
        let pages = fs::read_dir(format!("{root}/docs/src")).unwrap().map(|entry| entry.unwrap().path());
        let pages = pages
            .chain([format!("{root}/README.md").into()])
            .filter(|path| path.extension().is_some_and(|ext| ext == "md"));
        let mut tried = 0;
        for page in pages {
            let text = fs::read_to_string(&page).unwrap();
            for line in text.lines().filter(|line| line.starts_with("cargo run") && line.contains("-p gpt2 ")) {
                let Some((_, arguments)) = line.split_once(" -- ") else { continue };
                let arguments =
                    arguments.split('#').next().unwrap().split_whitespace().map(|word| word.trim_matches('"'));
                let line = ["gpt2"].into_iter().chain(arguments).map(OsString::from);
                let parsed = super::settings::command().try_get_matches_from(line);
                if let Err(error) = parsed {
                    panic!("{}: {error}", page.display());
                }
                tried += 1;
            }
        }
        assert!(tried >= 6, "only {tried} commands were found");
    }
}
