//! What ranks tell each other as values, for fuzzing.

use serde::{Deserialize, Serialize};

use super::{RankResult, decode, encode};
use crate::fuzzing::target::{Target, Verdict};
use crate::location::{NetworkLocation, OfferedAddress};

pub(crate) fn targets() -> Vec<Target> {
    // serde allocates memory for what a vector's length announces, up to 1 MiB ahead of what has come.
    vec![Target::new("gathered value", gathered_value, seeds).memory(4 << 20, 64)]
}

/// Of all shapes in which transports tell each other of themselves.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Sample {
    settings: String,
    salt: [u8; 32],
    location: NetworkLocation,
    numbers: (u8, u32, u64, i32, bool),
    addresses: Addresses,
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
enum Addresses {
    Tcp(Vec<OfferedAddress>),
    Unix { device: u64, path: String },
}

/// The one decoder of gathered values: what it takes it gives back, and nothing is longer than it came.
pub fn gathered_value(bytes: &[u8]) -> Verdict {
    let Ok(told) = decode::<RankResult<Sample>>(bytes) else { return Verdict::Rejected };
    let written = encode(&told).expect("what was read can be written");
    assert!(written.len() <= bytes.len(), "{told:?} came as {} B", bytes.len());
    assert_eq!(decode::<RankResult<Sample>>(&written).as_ref(), Ok(&told));
    Verdict::Accepted
}

fn seeds() -> Vec<Vec<u8>> {
    let sample = |addresses| Sample {
        settings: "lanes=2 gate=true".into(),
        salt: [0xa5; 32],
        location: NetworkLocation::default(),
        numbers: (1, 2, 1 << 40, -3, true),
        addresses,
    };
    let offer = |address: &str| OfferedAddress(address.parse().expect("an address"));
    let tcp = |addresses: &[&str]| Addresses::Tcp(addresses.iter().map(|address| offer(address)).collect());
    [
        RankResult::Ok(sample(tcp(&["127.0.0.1:4000"]))),
        RankResult::Ok(sample(tcp(&["10.0.0.1:1", "[fe80::1%2]:65535", "[::1]:80"]))),
        RankResult::Ok(sample(tcp(&[]))),
        RankResult::Ok(sample(Addresses::Unix { device: 64, path: "/tmp/comm-tcp-Ab1".into() })),
        RankResult::Err("rank 1 cannot listen".into()),
    ]
    .iter()
    .map(|told| encode(told).expect("a sample can be written"))
    .collect()
}
