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
    stated(page, short::costs(digest), "No cell communicates over a network, so no time is spent waiting for one.");
    said(page, late::statements(digest));
    network::write(page, digest);
}

/// What speaks for and against the figures.
pub(crate) fn trust(page: &mut Page, digest: &Digest<'_>) {
    page.section("trust", "Trust", "Can I trust this?");
    said(page, [control::work(digest), control::all(digest), doubts::first(digest), doubts::all(digest)].concat());
    page.topic("method", "How to read the figures");
    page.text(&format!(
        "A cell is one combination of settings; a round runs each cell once. The time of a step is that of the rank that took longest. The \
         time of a run is the median of its steps, without those before it settled, and the time of a cell is the mean of its runs. The \
         brackets are the interval of 95 % confidence of that mean; a cell with fewer than {ROUNDS} rounds has none. A round is good if \
         the run ended without an error, sent what its formula says, and any link emulator kept up. Two cells are compared by the ratio of \
         their times in the same good rounds, of which there must be at least {ROUNDS}. If the interval of that ratio does not contain 1, \
         the two are told apart. About one in twenty comparisons of equal cells finds a difference by chance."
    ));
    page.text("● the data supports it · ○ no difference was found · ▲ to be read with care");
}

/// Statements, or a sentence that says why there is none.
fn stated(page: &mut Page, statements: Statements, nothing: &str) {
    let statements = if statements.is_empty() { vec![(Mark::Open, nothing.into())] } else { statements };
    said(page, statements);
}
