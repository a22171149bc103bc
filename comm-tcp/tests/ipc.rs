//! ZeroMQ over Unix sockets: what is said of them, what is left behind, and who may come in.

#![allow(clippy::unwrap_used, reason = "only tests come here")]

use std::fs;
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::thread;

use comm_core::Error;
use comm_core::control::ControlExt;
use comm_core::location::NetworkLocation;
use comm_tcp::{TcpOptions, ZmqTransport};

use crate::common::{Addresses, Kind, PeerInfo, RankResult, controls, job, soon};

#[test]
fn facts_say_that_there_is_neither_tcp_nor_a_gate() {
    job(Kind::ZmqOverIpc, 2, &TcpOptions::default(), |transport| {
        assert_eq!(transport.name(), "tcp-ipc");
        let facts = transport.facts();
        let fact = |name: &str| facts.iter().find(|(each, _)| each == name).unwrap().1.clone();
        assert!(fact("connections").contains("Unix socket"), "{facts:?}");
        assert!(fact("gate").starts_with("none"), "{facts:?}");
        assert!(fact("congestion control").starts_with("none"), "{facts:?}");
        assert!(!fact("socket buffers (B)").is_empty(), "{facts:?}");
        transport.close(soon()).unwrap();
    });
}

/// The test is rank 0, which tells and dials by hand; rank 1 listens.
#[test]
fn a_process_of_the_same_user_that_is_no_rank_ends_the_job_and_nothing_is_left_behind() {
    let options = TcpOptions { ipc: true, ..TcpOptions::default() };
    let TcpOptions { lanes, window, segment, .. } = options;
    let ranks = controls(2);
    thread::scope(|scope| {
        let listener = scope.spawn(|| ZmqTransport::connect(&*ranks[1], &options, soon()).err());
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
        let root = fs::metadata("/").unwrap();
        let settings = format!("lanes={lanes} window={window} segment={segment} gate=filter ipc=true");
        let (machine, path) = (boot.trim().to_string(), "/".into());
        let addresses = Addresses::Unix { machine, device: root.dev(), inode: root.ino(), path };
        let peer_info: RankResult =
            Ok((settings, PeerInfo { salt: [0; 32], location: NetworkLocation::default(), addresses }));
        let told = ranks[0].gather("tcp addresses", &peer_info, soon()).unwrap();
        let Ok((_, PeerInfo { addresses: Addresses::Unix { path: folder, .. }, .. })) = &told[1] else {
            panic!("{told:?}")
        };
        assert_eq!(fs::metadata(folder).unwrap().permissions().mode() & 0o777, 0o700);
        ranks[0].gather_all("ipc folders seen", "", Ok(()), soon()).unwrap();
        // The opening of ZMTP 3.0, with an identity that is no token.
        let mut stream = UnixStream::connect(folder.join("0-0")).unwrap();
        let greeting = [&b"\xff\0\0\0\0\0\0\0\0\x7f\x03\0NULL"[..], &[0; 48]].concat();
        stream.write_all(&greeting).unwrap();
        stream.write_all(b"\x04\x2a\x05READY\x0bSocket-Type\0\0\0\x06DEALER\x08Identity\0\0\0\x01x").unwrap();
        let error = listener.join().unwrap().unwrap();
        assert!(matches!(error, Error::Protocol { .. }), "{error}");
        assert!(!folder.exists());
    });
}
