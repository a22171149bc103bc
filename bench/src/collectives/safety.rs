//! What precautions cost.

use std::hint::black_box;
use std::time::Instant;

use comm_core::{Algorithm, DType, HEADER_LEN, Header, OpKind, ReduceOp};
use isocomm::Rung;
use rig::stats::{Ratio, median};

use super::case::ResultPlacement;
use super::report::Row;

/// The price of each precaution on each transport: one line each, one column a size.
pub(super) fn prices(rows: &[Row]) -> String {
    let mut sizes: Vec<usize> = rows.iter().map(|row| row.size).collect();
    sizes.sort_unstable();
    sizes.dedup();
    let titles: String = sizes.iter().map(|size| format!(" {:>18}", format!("{size} B"))).collect();
    let mut lines = vec![format!("# {:<15} {:<10}{titles}", "price of", "on")];
    for with in Rung::of_safety() {
        for (what, without) in with.precautions() {
            let (with, without) = (with.name(), without.name());
            let of = |size: usize| {
                let mut rows = rows.iter().filter(|row| row.transport == with && row.size == size);
                let ratio = rows.find_map(|row| {
                    row.ratios.iter().find(|ratio| ratio.with == without && ratio.place == ResultPlacement::InPlace)
                });
                ratio.map_or("N/A".into(), |comparison| {
                    let Ratio { median, min, max } = comparison.ratio;
                    format!("{median:.2} ({min:.2}-{max:.2})")
                })
            };
            let cells: String = sizes.iter().map(|size| format!(" {:>18}", of(*size))).collect();
            // The transport alone, without what is said in the first column.
            let on = with.split('+').next().unwrap_or(&with);
            lines.push(format!("  {what:<15} {on:<10}{cells}"));
        }
    }
    lines.join("\n")
}

/// What the header before every message costs.
pub(super) fn headers() -> String {
    let header = Header {
        communicator: 1,
        sequence: 2,
        kind: OpKind::AllReduce,
        dtype: DType::F32,
        reduce: Some(ReduceOp::Sum),
        algorithm: Algorithm::Ring,
        root: 0,
        count: 1 << 20,
        division: 0,
        step: 3,
        payload_len: 1 << 19,
    };
    let bytes = header.encode();
    let write = each(|| {
        black_box(black_box(&header).encode());
    });
    let read = each(|| {
        // What a receiver does: reads it, and compares it with what it expects.
        let is_expected = Header::decode(black_box(&bytes), "a peer").is_ok_and(|read| read == *black_box(&header));
        black_box(is_expected);
    });
    format!("# header: {HEADER_LEN} B a message; {write:.0} ns to write it, {read:.0} ns to read and compare it")
}

/// Nanoseconds of one call: the median of several batches.
fn each(mut call: impl FnMut()) -> f64 {
    const BATCHES: usize = 15;
    const CALLS: u32 = 20_000;
    let batches: Vec<f64> = (0..BATCHES)
        .map(|_| {
            let start = Instant::now();
            (0..CALLS).for_each(|_| call());
            start.elapsed().as_nanos() as f64 / f64::from(CALLS)
        })
        .collect();
    median(&batches).unwrap_or_default()
}
