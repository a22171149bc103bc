//! Who may make network namespaces: root, and everybody else inside a user namespace of their own, where the system allows it.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::os::unix::process::CommandExt;
use std::process::Command;

use super::tools;

/// What `unshare` runs in the new namespaces, in which this user is root: a place for names of network namespaces (where there is none to
/// mount on, in a `/run` of its own), loopback, and then what it was given.
const SCRIPT: &str = "set -e
if [ -d /var/run/netns ]; then
    mount -t tmpfs -o mode=755 tmpfs /var/run/netns
else
    mount -t tmpfs -o mode=755 tmpfs /run
    mkdir /run/netns
fi
ip link set lo up
exec \"$@\"";

/// The network too: `ip` goes back to where it came from after it has made one, which takes the same rights there.
const UNSHARE: [&str; 8] = ["--user", "--map-root-user", "--mount", "--net", "--", "sh", "-c", SCRIPT];

/// Lets this program make network namespaces where it may not yet but can get there: it is replaced by itself, with the same arguments,
/// in a user namespace. To be called by a command that needs links, before it has done anything. Where that is not possible nothing
/// happens, and the command that wants a link says why.
pub fn gain_namespaces() {
    if missing_capabilities().is_none() || user_namespace().is_err() {
        return;
    }
    let Ok(program) = env::current_exe() else { return };
    let arguments: Vec<OsString> = env::args_os().skip(1).collect();
    let mut command = Command::new("unshare");
    command.args(UNSHARE).arg("bench").arg(program).args(arguments);
    // Returns only where it has failed, though it worked a moment ago.
    eprintln!("warning: cannot enter a user namespace: {}", command.exec());
}

/// Whether this process may make network namespaces and set up what is in them.
///
/// # Errors
/// What it lacks, for the user.
pub(super) fn may_make_namespaces() -> Result<(), String> {
    let Some(missing) = missing_capabilities() else { return Ok(()) };
    let instead = match user_namespace() {
        Ok(()) => "or a user namespace".into(),
        Err(why) => format!("or a user namespace, which this system refuses ({why})"),
    };
    Err(format!("network namespaces need root, and this process has no {missing}, {instead}; run it as root"))
}

/// Tries out whether [`SCRIPT`] works.
fn user_namespace() -> Result<(), String> {
    let said = tools::run("unshare", &[&UNSHARE[..], &["bench", "true"]].concat());
    // Without the script, which nobody wants to read.
    said.map(drop).map_err(|why| why.rsplit_once("`: ").map_or(why.clone(), |(_, last)| last.to_string()))
}

fn missing_capabilities() -> Option<String> {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let effective = status.lines().find_map(|line| u64::from_str_radix(line.strip_prefix("CapEff:")?.trim(), 16).ok());
    missing_of(effective.unwrap_or(0))
}

fn missing_of(effective: u64) -> Option<String> {
    // linux/capability.h
    let needed = [("CAP_NET_ADMIN", 12), ("CAP_SYS_ADMIN", 21)];
    let missing: Vec<&str> =
        needed.iter().filter(|(_, bit)| effective >> bit & 1 == 0).map(|(name, _)| *name).collect();
    (!missing.is_empty()).then(|| missing.join(" and no "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_process_lacks_is_named() {
        assert_eq!(missing_of(u64::MAX), None);
        assert_eq!(missing_of(1 << 12).unwrap(), "CAP_SYS_ADMIN");
        assert_eq!(missing_of(0).unwrap(), "CAP_NET_ADMIN and no CAP_SYS_ADMIN");
    }

    #[test]
    fn a_user_namespace_works_or_says_why_not() {
        match user_namespace() {
            Ok(()) => {}
            Err(why) => {
                assert!(!why.is_empty() && !why.contains("tmpfs -o"), "{why}");
                eprintln!("skipped: {why}");
            }
        }
    }
}
