//! The programs that set up a network, and the namespaces that they make.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

/// Where `ip` keeps the namespaces that have names.
pub(super) const NAMESPACES: &str = "/var/run/netns";

/// How the names of namespaces of this program begin.
const PREFIX: &str = "bench-link-";

/// Runs `ip` with `arguments`.
///
/// # Errors
/// What it says, for the user.
pub(super) fn ip(arguments: &[&str]) -> Result<(), String> {
    run("ip", arguments).map(drop)
}

/// Runs `tc` with `arguments`; its standard output.
///
/// # Errors
/// What it says, for the user.
pub(super) fn tc(arguments: &[&str]) -> Result<Vec<u8>, String> {
    run("tc", arguments)
}

/// Runs a program of the system to its end; its standard output.
///
/// # Errors
/// What it says, for the user.
pub(super) fn run(program: &str, arguments: &[&str]) -> Result<Vec<u8>, String> {
    let said = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        // Ctrl-C must not hit it while it takes a namespace away.
        .process_group(0)
        .output();
    match said {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            let package = if program == "unshare" { "util-linux" } else { "iproute2" };
            Err(format!("program `{program}` not found; install {package}"))
        }
        Err(error) => Err(format!("the program `{program}` does not start: {error}")),
        Ok(output) if !output.status.success() => {
            let text = String::from_utf8_lossy(&output.stderr);
            let why = text.lines().map(str::trim).find(|line| !line.is_empty()).unwrap_or("it printed nothing");
            Err(format!("`{program} {}`: {why}", arguments.join(" ")))
        }
        Ok(output) => Ok(output.stdout),
    }
}

/// A network namespace with a name, which is taken away when this is dropped.
#[derive(Debug)]
pub(super) struct Namespace {
    name: String,
}

impl Namespace {
    /// A new one, under a name that says which process it belongs to.
    ///
    /// # Errors
    /// What `ip` says, for the user.
    pub(super) fn new() -> Result<Self, String> {
        const TRIES: usize = 1000;
        let process = std::process::id();
        let began = start_of(process).unwrap_or(0);
        let mut why = String::new();
        for number in 0..TRIES {
            let name = format!("{PREFIX}{process}-{began}-{number}");
            if Path::new(NAMESPACES).join(&name).exists() {
                continue;
            }
            match ip(&["netns", "add", &name]) {
                Ok(()) => return Ok(Namespace { name }),
                // Another thread was quicker.
                Err(taken) if taken.contains("File exists") => why = taken,
                Err(why) => return Err(why),
            }
        }
        Err(format!("no free name for a network namespace: {why}"))
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Runs `ip` for what is in it.
    ///
    /// # Errors
    /// What it says, for the user.
    pub(super) fn ip(&self, arguments: &[&str]) -> Result<(), String> {
        ip(&[&["-netns", &self.name][..], arguments].concat())
    }

    /// Runs `tc` for what is in it; its standard output.
    ///
    /// # Errors
    /// What it says, for the user.
    pub(super) fn tc(&self, arguments: &[&str]) -> Result<Vec<u8>, String> {
        tc(&[&["-netns", &self.name][..], arguments].concat())
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        if let Err(why) = ip(&["netns", "delete", &self.name]) {
            eprintln!(
                "warning: a network namespace could not be removed: {why}; remove it with `ip netns delete {}`",
                self.name
            );
        }
    }
}

/// Takes away the namespaces of processes of this program that are gone; their names.
pub(super) fn remove_leftovers() -> Vec<String> {
    let entries = fs::read_dir(NAMESPACES).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    names.filter(|name| is_left_over(name)).filter(|name| ip(&["netns", "delete", name]).is_ok()).collect()
}

/// Whether the namespace belongs to a process of this program that is gone. A process number may have been given to another process
/// since, which then began at another time.
fn is_left_over(name: &str) -> bool {
    let Some(owner) = name.strip_prefix(PREFIX) else { return false };
    let mut parts = owner.split('-').map(str::parse::<u64>);
    let (Some(Ok(process)), Some(Ok(began))) = (parts.next(), parts.next()) else { return false };
    // Where `/proc` does not even show this process, nothing is known of others.
    start_of(std::process::id()).is_some()
        && u32::try_from(process).is_ok_and(|process| start_of(process) != Some(began))
}

/// When a process began, in clock ticks since the machine did; `None` if there is no such process.
fn start_of(process: u32) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The second field, the program's name, may hold anything, and ends with the last bracket; the start is field 22 (man 5 proc).
    let (_, fields) = text.rsplit_once(')')?;
    fields.split_whitespace().nth(19)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_program_is_named() {
        let why = run("no-such-program", &["x"]).unwrap_err();
        assert!(why.contains("no-such-program") && why.contains("iproute2"), "{why}");
        let why = run("false", &["x"]).unwrap_err();
        assert!(why.contains("`false x`"), "{why}");
    }

    #[test]
    fn only_namespaces_of_the_dead_are_left_over() {
        let process = std::process::id();
        let began = start_of(process).unwrap();
        assert!(!is_left_over(&format!("{PREFIX}{process}-{began}-0")), "this process lives");
        assert!(is_left_over(&format!("{PREFIX}{process}-{}-0", began + 1)), "another had the number before");
        // Above the kernel's largest process number.
        assert!(is_left_over(&format!("{PREFIX}4194305-1-0")));
        for foreign in ["bench-link-", "bench-link-x-1-0", "bench-link-4194305", "other-4194305-1-0", "bench-link"] {
            assert!(!is_left_over(foreign), "{foreign}");
        }
    }
}
