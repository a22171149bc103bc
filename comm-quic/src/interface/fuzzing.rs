//! The kernel's tables of routes and addresses, for fuzzing.

use comm_core::fuzzing::{Target, Verdict};

use super::{interface_v4, interface_v6};

pub(crate) fn targets() -> Vec<Target> {
    vec![Target::new("interface tables", interface_tables, seeds)]
}

/// Both tables, looked through for one address.
pub fn interface_tables(bytes: &[u8]) -> Verdict {
    let text = String::from_utf8_lossy(bytes);
    let v4 = interface_v4(&text, [10, 0, 1, 7].into());
    let v6 = interface_v6(&text, "fd00::2".parse().expect("an address"));
    for name in v4.iter().chain(&v6) {
        assert!(!name.is_empty() && text.contains(name.as_str()));
    }
    (v4.is_some() || v6.is_some()).into()
}

fn seeds() -> Vec<Vec<u8>> {
    let routes = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n\
         eth0\t00000000\t0100000A\t0003\t0\t0\t0\t00000000\t0\t0\t0\n\
         eth0\t0000000A\t00000000\t0001\t0\t0\t0\t000000FF\t0\t0\t0\n\
         ib0\t0001000A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n";
    let addresses = "00000000000000000000000000000001 01 80 10 80       lo\n\
         fd000000000000000000000000000002 02 40 00 80     eth0\n";
    vec![routes.into(), addresses.into()]
}
