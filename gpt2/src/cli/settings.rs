//! Settings from a file: `gpt2 train --config run.toml`.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use clap::builder::ArgAction;
use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Command, CommandFactory};
use toml::{Table, Value};

use super::{Cli, CliError, folder};

/// The command that takes settings from a file.
const TRAIN: &str = "train";
/// The option that names the file.
const FILE: &str = "config";

/// Longest file of settings, in bytes.
const LONGEST: u64 = 1 << 20;

/// The command line of the program. A switch of training may be given a value, so that one that a file turns on can be turned off.
pub(super) fn command() -> Command {
    let switch = |arg: Arg| match arg.get_action() {
        ArgAction::SetTrue => arg
            .action(ArgAction::Set)
            .num_args(0..=1)
            .require_equals(true)
            .default_value("false")
            .default_missing_value("true")
            .hide_default_value(true)
            .hide_possible_values(true)
            .value_name("BOOL"),
        _ => arg,
    };
    Cli::command().mut_subcommand(TRAIN, |train| train.mut_args(switch))
}

/// The arguments of the program, with the settings of the file that they name in front of what was given itself. Arguments that are wrong stay
/// as they are, for whoever parses them.
///
/// # Errors
/// The file cannot be read, is no TOML, or has a setting that is unknown or not as the option takes it.
pub(super) fn with_file(arguments: Vec<OsString>) -> Result<Vec<OsString>, CliError> {
    let Ok(matches) = command().try_get_matches_from(&arguments) else { return Ok(arguments) };
    let Some((TRAIN, given)) = matches.subcommand() else { return Ok(arguments) };
    let Some(path) = given.get_one::<PathBuf>(FILE) else { return Ok(arguments) };
    let settings = read(path)?;
    let (mut all, mut kept) = (Vec::new(), Vec::new());
    for (name, argument) in &settings {
        all.push(argument.clone());
        if !is_given(given, name) && !is_overruled(given, name) {
            kept.push(argument.clone());
        }
    }
    let in_file = |arguments: Vec<OsString>| {
        let line = ["gpt2", TRAIN].map(OsString::from).into_iter().chain(arguments);
        command().try_get_matches_from(line)
    };
    // What is wrong in the file is not to be taken for something of the command line.
    if let Err(error) = in_file(all) {
        let said = error.to_string();
        let first = said.lines().next().unwrap_or_default();
        let what = first.strip_prefix("error: ").unwrap_or(first);
        return Err(format!("--config {}: {what}", path.display()).into());
    }
    let (program, rest) = arguments.split_at(2.min(arguments.len()));
    Ok(program.iter().cloned().chain(kept).chain(without_file(rest)).collect())
}

/// The settings in the file at `path` as arguments, by the names of their options.
fn read(path: &Path) -> Result<BTreeMap<String, OsString>, CliError> {
    let in_file = |what: String| CliError::from(format!("--config {}: {what}", path.display()));
    let metadata = fs::metadata(path).map_err(|error| in_file(format!("cannot read it: {error}")))?;
    if !metadata.is_file() || metadata.len() > LONGEST {
        return Err(in_file(format!("it is not a regular file of at most {LONGEST} bytes")));
    }
    let text = fs::read_to_string(path).map_err(|error| in_file(format!("cannot read it: {error}")))?;
    let table: Table = text.parse().map_err(|error: toml::de::Error| in_file(error.to_string().trim_end().into()))?;
    arguments(&table).map_err(in_file)
}

/// Each setting as an argument.
fn arguments(table: &Table) -> Result<BTreeMap<String, OsString>, String> {
    let command = command();
    let train = command.find_subcommand(TRAIN).ok_or("this program does not train")?;
    let shown = train.get_arguments().filter(|argument| !argument.is_hide_set());
    let known: Vec<&str> = shown.filter_map(Arg::get_long).filter(|name| ![FILE, "help"].contains(name)).collect();
    let mut arguments = BTreeMap::new();
    for (key, value) in table {
        let name = key.replace('_', "-");
        if !known.contains(&name.as_str()) {
            return Err(format!("unknown setting '{key}', expected one of {}", known.join(", ")));
        }
        let value = match value {
            Value::String(text) => text.clone(),
            Value::Integer(number) => number.to_string(),
            Value::Float(number) => number.to_string(),
            Value::Boolean(is) => is.to_string(),
            Value::Datetime(_) | Value::Array(_) | Value::Table(_) => {
                return Err(format!(
                    "the setting '{key}' is of type {}; give a string, a number or a boolean",
                    value.type_str()
                ));
            }
        };
        if arguments.insert(name.clone(), format!("--{name}={value}").into()).is_some() {
            return Err(format!("the setting '{name}' is given twice, once with - and once with _; keep one of them"));
        }
    }
    Ok(arguments)
}

/// Whether an option is on the command line.
fn is_given(given: &ArgMatches, name: &str) -> bool {
    let id = name.replace('-', "_");
    matches!(given.try_contains_id(&id), Ok(true)) && given.value_source(&id) == Some(ValueSource::CommandLine)
}

/// Pairs of options of which one takes the other's place: where a run begins.
const EITHER: [(&str, &str); 2] = [("init-from", "resume"), ("resume", "init-from")];

/// Whether an option on the command line takes the place of the file's `name`.
fn is_overruled(given: &ArgMatches, name: &str) -> bool {
    // Where there is no checkpoint yet, the run begins with the weights.
    let resume = given.try_get_one::<PathBuf>("resume").ok().flatten();
    if resume.is_some_and(|resume| folder::is_auto(resume)) && name == "init-from" {
        return false;
    }
    EITHER.iter().any(|(of_file, of_line)| *of_file == name && is_given(given, of_line))
}

/// The arguments without the option that names the file.
fn without_file(arguments: &[OsString]) -> Vec<OsString> {
    let option = OsString::from(format!("--{FILE}"));
    let joined = format!("--{FILE}=");
    let mut kept = Vec::with_capacity(arguments.len());
    let mut arguments = arguments.iter();
    while let Some(argument) = arguments.next() {
        if *argument == option {
            // And its value.
            arguments.next();
        } else if !argument.to_string_lossy().starts_with(&joined) {
            kept.push(argument.clone());
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(file: &str, arguments: &[&str]) -> Result<Vec<String>, String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run.toml");
        fs::write(&path, file).unwrap();
        let line = ["gpt2", "train"].iter().chain(arguments).map(OsString::from);
        let line = line.chain([OsString::from("--config"), path.into_os_string()]).collect();
        let all = with_file(line).map_err(|error| error.to_string())?;
        assert_eq!(all[..2], ["gpt2", "train"]);
        Ok(all[2..].iter().map(|argument| argument.to_str().unwrap().to_owned()).collect())
    }

    #[test]
    fn the_command_line_wins_over_the_file() {
        let file = "strategy = \"ddp\"\nnproc = 2\nlr = 6e-4\nrecompute = true\nno_gate = true\n";
        let all = ["--lr=0.0006", "--no-gate=true", "--nproc=2", "--recompute=true", "--strategy=ddp"];
        assert_eq!(with(file, &[]).unwrap(), all);
        let given = ["--lr", "1e-3", "--recompute=false"];
        let merged = with(file, &given).unwrap();
        assert_eq!(merged, [&["--no-gate=true", "--nproc=2", "--strategy=ddp"][..], &given[..]].concat());
        let matches =
            command().try_get_matches_from(["gpt2", "train"].into_iter().chain(merged.iter().map(String::as_str)));
        let matches = matches.unwrap();
        let (_, train) = matches.subcommand().unwrap();
        assert_eq!(train.get_one::<f64>("lr"), Some(&1e-3));
        assert_eq!(
            (train.get_flag("recompute"), train.get_flag("no_gate"), train.get_flag("overwrite")),
            (false, true, false)
        );
    }

    #[test]
    fn where_a_run_begins_is_said_by_the_command_line_alone() {
        let weights = "init_from = \"weights\"\nlr = 1\n";
        assert_eq!(with(weights, &[]).unwrap(), ["--init-from=weights", "--lr=1"]);
        assert_eq!(with(weights, &["--resume", "latest"]).unwrap(), ["--lr=1", "--resume", "latest"]);
        assert_eq!(
            with(weights, &["--resume", "auto"]).unwrap(),
            ["--init-from=weights", "--lr=1", "--resume", "auto"]
        );
        assert_eq!(with("resume = \"latest\"", &["--init-from", "w"]).unwrap(), ["--init-from", "w"]);
        // In the file itself they contradict each other, which is said where they are looked at.
        let both = "init_from = \"weights\"\nresume = \"latest\"\n";
        assert_eq!(with(both, &[]).unwrap(), ["--init-from=weights", "--resume=latest"]);
    }

    #[test]
    fn what_is_wrong_in_the_file_is_named() {
        for (file, expected) in [
            ("lrr = 1e-3", "unknown setting 'lrr'"),
            ("config = \"other.toml\"", "unknown setting 'config'"),
            ("restarts = 1", "unknown setting 'restarts'"),
            ("help = true", "unknown setting 'help'"),
            ("[train]\nlr = 1", "unknown setting 'train'"),
            ("lr = [1, 2]", "the setting 'lr' is of type array"),
            ("block-size = 8\nblock_size = 9", "'block-size' is given twice"),
            ("lr = 1\nlr = 2", "duplicate"),
            ("lr = ", "TOML"),
            ("lr = \"fast\"", "'fast'"),
            ("steps = -1", "-1"),
            ("recompute = \"maybe\"", "maybe"),
            ("strategy = \"telepathy\"", "telepathy"),
        ] {
            let said = with(file, &[]).unwrap_err();
            assert!(said.starts_with("--config ") && said.contains("run.toml"), "{said}");
            assert!(said.contains(expected), "{file}: {said}");
        }
        let missing = ["gpt2", "train", "--config=/nowhere/run.toml"].map(OsString::from).to_vec();
        assert!(with_file(missing).unwrap_err().to_string().contains("/nowhere/run.toml"));
    }

    #[test]
    fn other_arguments_stay_as_they_are() {
        for line in
            [&["gpt2", "sample"][..], &["gpt2", "train", "--lr", "1"], &["gpt2", "train", "--no-such"], &["gpt2"]]
        {
            let line: Vec<OsString> = line.iter().map(OsString::from).collect();
            assert_eq!(with_file(line.clone()).unwrap(), line);
        }
    }
}
