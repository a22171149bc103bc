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
use std::io::ErrorKind;
use std::process::ExitCode;
use std::sync::Arc;

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
    /// Train a model, in one process or several.
    Train(Box<train::TrainArgs>),
    /// Write text with a trained model.
    Sample(sample::SampleArgs),
    /// Measure a trained model on a text or on HellaSwag.
    Eval(eval::EvalArgs),
    /// Convert text, JSON lines or Parquet of any size into token shards for `gpt2 train --data`.
    Data(data::DataArgs),
    /// Save a GPT-2 of this program, or of Hugging Face's transformers, in a form that both can open.
    Convert(convert::ConvertArgs),
    /// List the devices and libraries that this build can use on this machine, and for each one that it cannot use, why.
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

/// What a command fails with that may go well when it is started again as it is: what is in its way passes by itself.
#[derive(Debug)]
struct Passing(String);

impl fmt::Display for Passing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Passing {}

/// The error of an operation of the system with the message `said`: [`Passing`], unless its kind says that something else was asked for than
/// there is.
fn of_system(kind: ErrorKind, said: String) -> CliError {
    if is_asked_wrongly(kind) { said.into() } else { Passing(said).into() }
}

/// Whether an operation of the system fails so for what it was asked for, rather than for the state that the machine is in.
fn is_asked_wrongly(kind: ErrorKind) -> bool {
    use ErrorKind as Kind;
    matches!(
        kind,
        Kind::AddrNotAvailable
            | Kind::AlreadyExists
            | Kind::InvalidData
            | Kind::InvalidFilename
            | Kind::InvalidInput
            | Kind::IsADirectory
            | Kind::NotADirectory
            | Kind::NotFound
            | Kind::Other
            | Kind::PermissionDenied
            | Kind::ReadOnlyFilesystem
            | Kind::UnexpectedEof
            | Kind::Unsupported
    )
}

/// Whether what a command fails with may go well when it is started again.
fn is_passing(error: &CliError) -> bool {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error.as_ref());
    while let Some(error) = cause {
        if error.is::<Passing>() {
            return true;
        }
        let shared = error.downcast_ref::<Arc<std::io::Error>>().map(|error| &**error);
        if let Some(error) = shared.or_else(|| error.downcast_ref()) {
            return !is_asked_wrongly(error.kind());
        }
        cause = error.source();
    }
    false
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;
    use std::fs;

    #[test]
    fn what_passes_by_itself_is_told_from_what_was_asked_for_wrongly() {
        use std::io::{Error, ErrorKind};
        let of_core = |kind: ErrorKind| comm_core::Error::io("x", Error::from(kind));
        let cases: [(super::CliError, bool); 10] = [
            (super::Passing("x".into()).into(), true),
            ("x".into(), false),
            (comm_core::Error::invalid("x").into(), false),
            (Error::from(ErrorKind::StorageFull).into(), true),
            (Error::from_raw_os_error(EIO).into(), true),
            (Error::from(ErrorKind::NotFound).into(), false),
            (of_core(ErrorKind::AddrInUse).into(), true),
            (of_core(ErrorKind::PermissionDenied).into(), false),
            (super::of_system(ErrorKind::AddrInUse, "x".into()), true),
            (super::of_system(ErrorKind::AddrNotAvailable, "x".into()), false),
        ];
        for (error, expected) in cases {
            assert_eq!(super::is_passing(&error), expected, "{error:?}");
        }
    }

    const EIO: i32 = 5;

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
