//! TCP congestion control: what a connection really uses, and a network namespace in which everybody uses the same.

use std::ffi::OsString;
use std::io;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use socket2::{Domain, SockRef, Socket, Type};

/// What a connected TCP socket on loopback says it uses.
///
/// # Errors
/// The operating system's.
pub(crate) fn in_use() -> io::Result<String> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let stream = TcpStream::connect(listener.local_addr()?)?;
    let name = SockRef::from(&stream).tcp_congestion()?;
    Ok(String::from_utf8_lossy(&name).trim_end_matches('\0').to_string())
}

/// Whether the kernel lets a socket use `name`.
///
/// # Errors
/// Why not, for the user.
pub(crate) fn check(name: &str) -> Result<(), String> {
    // The kernel reads at most 15 bytes of a name, so a longer one may mean another.
    if name.is_empty() || name.len() > 15 {
        return Err("the name must have 1 to 15 letters".into());
    }
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).map_err(|error| format!("no socket: {error}"))?;
    socket.set_tcp_congestion(name.as_bytes()).map_err(|error| {
        let known = std::fs::read_to_string("/proc/sys/net/ipv4/tcp_available_congestion_control").unwrap_or_default();
        format!("the kernel does not support it or does not allow it ({error}); available are: {}", known.trim())
    })
}

/// Replaces this process by itself in a network namespace of its own, with one more argument. Returns only on failure.
///
/// # Errors
/// Why there can be no namespace, for the user.
pub(crate) fn enter(name: &str) -> String {
    // Asked first, because after the replacement nobody is left to explain.
    let probe = Command::new("unshare").args(["--net", "true"]).stdin(Stdio::null()).output();
    let refused = match probe {
        Err(error) => Some(format!("the program `unshare` (util-linux) does not start: {error}")),
        Ok(output) if !output.status.success() => Some(last_line(&output.stderr)),
        Ok(_) => None,
    };
    if let Some(why) = refused {
        return format!(
            "--namespace-congestion {name}: cannot make a network namespace, which needs root: {why}; --congestion works without root, but \
             sets only the sockets of tcp-raw and tcp"
        );
    }
    if let Err(why) = check(name) {
        return format!("--namespace-congestion {name}: {why}");
    }
    let program = match std::env::current_exe() {
        Ok(program) => program,
        Err(error) => return format!("the path of this program is unknown: {error}"),
    };
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    let error = Command::new("unshare").args(["--net", "--"]).arg(program).args(arguments).arg("--in-namespace").exec();
    format!("starting `unshare`: {error}")
}

/// Sets up the loopback of the namespace that this process is in, so that TCP uses `name` whoever opens the socket.
///
/// # Errors
/// Which step failed, for the user.
pub(crate) fn set_up_namespace(name: &str) -> Result<(), String> {
    let route =
        |what| ["route", "replace", "local", what, "dev", "lo", "table", "local", "congctl", name].map(String::from);
    let up = ["link", "set", "lo", "up"].map(String::from);
    for arguments in [up.to_vec(), route("127.0.0.0/8").to_vec(), route("127.0.0.1").to_vec()] {
        let said = Command::new("ip").args(&arguments).stdin(Stdio::null()).output();
        let why = match said {
            Err(error) => format!("the program `ip` (iproute2) does not start: {error}"),
            Ok(output) if !output.status.success() => last_line(&output.stderr),
            Ok(_) => continue,
        };
        return Err(format!("--namespace-congestion {name}: `ip {}`: {why}", arguments.join(" ")));
    }
    match in_use() {
        Ok(used) if used == name => Ok(()),
        Ok(used) => Err(format!("--namespace-congestion {name}: a connection in the namespace uses {used} instead")),
        Err(error) => Err(format!("--namespace-congestion {name}: a test connection in the namespace failed: {error}")),
    }
}

fn last_line(said: &[u8]) -> String {
    let said = String::from_utf8_lossy(said);
    said.lines().map(str::trim).rfind(|line| !line.is_empty()).unwrap_or("it printed nothing").to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_says_what_it_uses() {
        let name = in_use().unwrap();
        check(&name).unwrap();
        assert!(check("pigeon").unwrap_err().contains("available are"));
        assert!(check("a-name-that-is-too-long").is_err());
    }
}
