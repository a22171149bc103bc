//! A device in a network namespace whose packets come to this process.

use std::fs::File;
use std::io::{Read, Seek};
use std::path::Path;
use std::{io, thread};

use super::spec::EndSpec;
use super::sys;
use crate::link::tools::ip;

/// Where `ip` keeps the namespaces that have names.
const NAMESPACES: &str = "/var/run/netns";

/// Packets that the kernel keeps until they are fetched. Losing them is for the model.
const KERNEL_QUEUE: &str = "10000";

/// A TUN device, which is there until this is dropped.
#[derive(Debug)]
pub(super) struct Device {
    pub(super) packets: File,
    /// `/proc/net/dev` of its namespace.
    statistics: File,
    name: String,
    namespace: String,
}

impl Device {
    /// Makes it, gives it its address, and switches it on.
    ///
    /// # Errors
    /// What is missing, for the user.
    pub(super) fn new(end: &EndSpec, mtu: u32) -> Result<Self, String> {
        let EndSpec { namespace, device: name, address, prefix, .. } = end;
        let open = || Ok((sys::make_tun(name)?, File::open("/proc/thread-self/net/dev")?));
        let (packets, statistics) = within(namespace, open)?.map_err(|error: io::Error| {
            let hint = match error.kind() {
                io::ErrorKind::ResourceBusy => "; a device of that name already exists",
                kind => super::tun_hint(kind),
            };
            format!("making the TUN device {name} in {namespace}: {error}{hint}")
        })?;
        let device = Device { packets, statistics, name: name.clone(), namespace: namespace.clone() };
        ip(&["-netns", namespace, "link", "set", "lo", "up"])?;
        ip(&["-netns", namespace, "address", "add", &format!("{address}/{prefix}"), "dev", name])?;
        let mtu = mtu.to_string();
        ip(&["-netns", namespace, "link", "set", name, "txqueuelen", KERNEL_QUEUE, "mtu", &mtu, "up"])?;
        Ok(device)
    }

    /// Packets that the kernel has dropped because its queue was full; 0 where it does not tell.
    pub(super) fn dropped(&mut self) -> u64 {
        let mut text = String::new();
        if self.statistics.rewind().and_then(|()| self.statistics.read_to_string(&mut text)).is_err() {
            return 0;
        }
        dropped(&text, &self.name).unwrap_or(0)
    }

    /// Its name and where it is.
    pub(super) fn describe(&self) -> String {
        format!("the device {} in {}", self.name, self.namespace)
    }
}

/// Runs `work` in a network namespace, by a thread of its own: sockets and devices that it opens stay there.
///
/// # Errors
/// There is no such namespace, or this process must not enter it.
pub(super) fn within<T: Send>(namespace: &str, work: impl FnOnce() -> T + Send) -> Result<T, String> {
    let path = Path::new(NAMESPACES).join(namespace);
    let there = File::open(&path).map_err(|error| format!("the network namespace {}: {error}", path.display()))?;
    let inside = || sys::enter_network(&there).map(|()| work());
    let ended = thread::scope(|scope| scope.spawn(inside).join());
    let entered = ended.map_err(|_| format!("a thread in the network namespace {namespace} panicked"))?;
    entered.map_err(|error| format!("entering the network namespace {namespace}: {error}"))
}

/// The dropped packets among the sent ones, in the text of `/proc/net/dev`: eight figures of what was received come first, then bytes,
/// packets, errors and drops of what was sent.
fn dropped(text: &str, device: &str) -> Option<u64> {
    let figures = |line: &'_ str| {
        let (name, figures) = line.split_once(':')?;
        (name.trim() == device).then(|| figures.split_whitespace().nth(11)?.parse().ok())?
    };
    text.lines().find_map(figures)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drops_are_found() {
        let text = "Inter-|   Receive                                                |  Transmit\n \
            face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed\n    \
            lo:       1       2    3    4    5     6          7         8        9      10   11   12   13    14      15         16\n \
            link0:      0       0    0    0    0     0          0         0       99      88   77   66    0     0       0          0\n";
        assert_eq!(dropped(text, "link0"), Some(66));
        assert_eq!(dropped(text, "lo"), Some(12));
        assert_eq!(dropped(text, "link"), None);
        assert_eq!(dropped("link0: 1 2", "link0"), None);
    }

    #[test]
    fn a_namespace_that_is_not_there_is_named() {
        let why = within("bench-link-none", || ()).unwrap_err();
        assert!(why.contains("/bench-link-none"), "{why}");
    }
}
