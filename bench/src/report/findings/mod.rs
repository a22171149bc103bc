//! The answer in words: what the data supports, and no more. A difference is told only between cells with at least three common rounds and
//! where the interval of their ratio does not hold 1.

mod congestion;
mod control;
mod doubts;
mod flips;
mod late;
mod network;
mod quic;
mod ranking;
mod rungs;
mod short;
mod statements;

pub(super) use congestion::congestion;
pub(super) use late::table as late_table;
pub(super) use network::{added, is_networked};
pub(super) use quic::{Pair, pairs};

use super::case::ROUNDS;
use super::digest::Digest;
use super::html::{Mark, Page};
use statements::{Statements, said};

/// Which strategy is fastest where.
pub(crate) fn strategies(page: &mut Page, digest: &Digest<'_>) {
    page.section("strategy", "Strategies", "Which strategy should I use on this link?");
    let nothing =
        format!("No link has two strategies with {ROUNDS} good rounds in common, so none is called the fastest.");
    stated(page, short::strategies(digest), &nothing);
    ranking::write(page, digest);
    flips::write(page, digest);
}

/// What QUIC and other transports change.
pub(crate) fn transports(page: &mut Page, digest: &Digest<'_>) {
    page.section("quic", "QUIC", "What would QUIC change?");
    let nothing = format!(
        "No strategy ran over both QUIC and ZeroMQ with {ROUNDS} good rounds in common, so the two are not compared."
    );
    stated(page, short::quic(digest), &nothing);
    quic::write(page, digest);
    let prices = rungs::prices(digest);
    if !prices.is_empty() {
        page.topic("ladder", "What each transport and each precaution costs");
        said(page, prices);
    }
}

/// What links cost.
pub(crate) fn time(page: &mut Page, digest: &Digest<'_>) {
    page.section("time", "Time", "Where does the time go?");
    stated(page, short::costs(digest), "No cell talks over a network, so there is no waiting to be told of.");
    said(page, late::statements(digest));
    network::write(page, digest);
}

/// What speaks for and against the figures.
pub(crate) fn trust(page: &mut Page, digest: &Digest<'_>) {
    page.section("trust", "Trust", "Can I trust this?");
    said(page, [control::work(digest), control::all(digest), doubts::first(digest), doubts::all(digest)].concat());
    page.topic("method", "How to read the figures");
    page.text(&format!(
        "A time is that of the rank that took longest: the median over the settled steps of a run, and the mean of these over rounds. In brackets \
         stands where that mean lies with a confidence of 95 %; fewer than {ROUNDS} rounds get no brackets. Two cells are compared by the ratio of \
         their times in the same rounds, of which there must be {ROUNDS} at least. If the interval of that ratio does not hold 1, the two are told \
         apart. Of twenty such differences one may be chance."
    ));
    page.text("● the data supports it · ○ no difference was found · ▲ to be read with care");
}

/// Statements, or a sentence that says why there is none.
fn stated(page: &mut Page, statements: Statements, nothing: &str) {
    let statements = if statements.is_empty() { vec![(Mark::Open, nothing.into())] } else { statements };
    said(page, statements);
}
