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
use super::html::Page;
use statements::said;

pub(crate) fn write(page: &mut Page, digest: &Digest<'_>) {
    page.section("answer", "Answer", "What came out");
    if digest.cases.iter().all(|case| case.step.is_none()) {
        page.text("No cell has figures, so there is nothing to say but what went wrong.");
        said(page, "Holes and doubts", doubts::all(digest));
        return;
    }
    page.small(&format!(
        "Times are medians over settled steps, of the rank that took longest, and means of these over rounds; in brackets, where that mean \
         lies with a confidence of 95 %, so that of twenty differences one may be chance. Ratios are of the same rounds, and they alone decide \
         whether two cells are told apart: with {ROUNDS} rounds in common at least, and an interval of the ratio without 1. A filled sign (●) \
         stands before what the data supports, an empty one (○) where no difference is to be told, a triangle (▲) before what is to be read \
         with care."
    ));
    said(page, "In short", short::by_link(digest));
    page.statements(&doubts::first(digest));
    ranking::write(page, digest);
    flips::write(page, digest);
    quic::write(page, digest);
    network::write(page, digest);
    said(page, "What each rung of the ladder costs", rungs::prices(digest));
    said(page, "Ranks that the others wait for", late::statements(digest));
    said(page, "Whether the method can be trusted", control::all(digest));
    said(page, "Holes and doubts", doubts::all(digest));
}
