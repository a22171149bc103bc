//! Where ranks listen, for fuzzing.

use comm_core::fuzzing::{Target, Verdict};
use comm_core::place::Place;

use super::{Addresses, Advert};
use crate::house::Folder;

const SETTINGS: &str = "lanes=2 window=4194304 segment=131072 gate=true ipc=false";

pub(crate) fn targets() -> Vec<Target> {
    vec![Target::new("tcp addresses", tcp_addresses, seeds)]
}

/// [`Advert::decode`].
pub fn tcp_addresses(bytes: &[u8]) -> Verdict {
    let Ok(advert) = Advert::decode(bytes, SETTINGS, 1) else { return Verdict::Rejected };
    assert_eq!(advert.encode(SETTINGS).as_bytes(), bytes, "an advert has one encoding");
    for (peer, lane) in [(0, 0), (1, 1), (2, 0), (1 << 16, 7)] {
        let _ = advert.address(peer, lane, 8);
    }
    Verdict::Accepted
}

fn seeds() -> Vec<Vec<u8>> {
    let place = |text| Place::decode(text).expect("a place");
    let here = place("00112233445566778899aabbccddeeff 10.0.0.1");
    let advert = |addresses: &[&str]| {
        let addresses = addresses.iter().map(|address| address.parse().expect("an address")).collect();
        Advert { salt: [0xa5; 32], place: here, addresses: Addresses::Tcp(addresses) }.encode(SETTINGS).into_bytes()
    };
    let folder = Folder { machine: "5f0c".into(), device: 64, inode: 12_345, path: "/tmp/comm-tcp-Ab1".into() };
    let folder = Advert { salt: [0x5a; 32], place: place("- -"), addresses: Addresses::Unix(folder) }
        .encode(SETTINGS)
        .into_bytes();
    vec![advert(&["127.0.0.1:4000"]), advert(&["10.0.0.1:1", "[fe80::1%2]:65535", "[::1]:80"]), advert(&[]), folder]
}
