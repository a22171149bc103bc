//! Transports that commands take where nobody names any, from the registry.

use isocomm::{Medium, TransportKind};

/// Those that move bytes, whatever the device that computes.
pub fn of_bytes() -> Vec<TransportKind> {
    TransportKind::all().into_iter().filter(|kind| kind.medium() != Medium::Devices).collect()
}

/// Those of them whose ranks are processes.
pub fn between_processes() -> Vec<TransportKind> {
    of_bytes().into_iter().filter(|kind| kind.medium().joins_processes()).collect()
}

/// Those of them that go over a network.
pub fn over_networks() -> Vec<TransportKind> {
    of_bytes().into_iter().filter(|kind| kind.medium().crosses_hosts()).collect()
}

/// Their names, for people.
pub fn names(kinds: &[TransportKind]) -> String {
    kinds.iter().map(|kind| kind.name()).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_left_out_and_threads_where_processes_are_needed() {
        let names = |kinds: Vec<TransportKind>| kinds.into_iter().map(TransportKind::name).collect::<Vec<_>>();
        assert_eq!(names(of_bytes()), ["local", "shm", "tcp-raw", "tcp", "quic"]);
        assert_eq!(names(between_processes()), ["shm", "tcp-raw", "tcp", "quic"]);
        assert_eq!(names(over_networks()), ["tcp-raw", "tcp", "quic"]);
    }
}
