//! The answer in words: what the data supports, and no more. A difference is told only between cells with at least three common rounds and
//! where the interval of their ratio does not hold 1.

mod control;
mod network;
mod ranking;
mod rungs;
mod short;

pub(super) use network::congestion;

use super::digest::{Digest, ROUNDS};
use super::html::{Mark, Page};
use super::text::{count, figure, listed, share};
use crate::record::FlagKind;

/// Statements of one kind that are shown before the rest is folded.
const SHOWN: usize = 12;

/// Share of a step from which on waiting for late ranks is told of.
const SKEW: f64 = 0.1;

pub(crate) type Statements = Vec<(Mark, String)>;

pub(crate) fn write(page: &mut Page, digest: &Digest<'_>) {
    page.section("answer", "Answer", "What came out");
    if digest.cases.iter().all(|case| case.step.is_none()) {
        page.text("No cell has figures, so there is nothing to say but what went wrong.");
        said(page, "Holes and doubts", doubts(digest));
        return;
    }
    page.small(&format!(
        "Times are medians over settled steps, of the rank that took longest, and means of these over rounds; in brackets, where that mean \
         lies with a confidence of 95 %, so that of twenty differences one may be chance. Ratios are of the same rounds. A filled sign (●) \
         stands before what the data supports: {ROUNDS} rounds in common at least, and an interval without 1. An empty one (○) stands where no \
         difference is to be told, a triangle (▲) before what is to be read with care."
    ));
    said(page, "In short", short::by_link(digest));
    said(page, "Which strategy is fastest", ranking::fastest(digest));
    said(page, "Where the order turns round", ranking::flips(digest));
    said(page, "QUIC against TCP", network::quic(digest));
    said(page, "What the network costs", network::cost(digest));
    said(page, "What each rung of the ladder costs", rungs::prices(digest));
    said(page, "Ranks that the others wait for", late(digest));
    said(page, "Whether the method can be trusted", control::all(digest));
    said(page, "Holes and doubts", doubts(digest));
}

/// Statements under a heading; of none nothing is written.
fn said(page: &mut Page, title: &str, mut statements: Statements) {
    if statements.is_empty() {
        return;
    }
    page.heading(title);
    let rest = statements.split_off(SHOWN.min(statements.len()));
    page.statements(&statements);
    if !rest.is_empty() {
        page.folded(&format!("{} more", rest.len()), |page| page.statements(&rest));
    }
}

/// Cells whose ranks wait long for others, and for whom.
fn late(digest: &Digest<'_>) -> Statements {
    let mut found: Vec<(f64, String)> = Vec::new();
    for case in &digest.cases {
        let (Some(step), Some(skew)) = (case.step, case.mean("skew")) else { continue };
        if skew < SKEW * step.estimate {
            continue;
        }
        let ranks = case.cell.ranks;
        // How long the others waited for each rank, all together.
        let waited: Vec<f64> = (0..ranks)
            .map(|late| {
                let by = |rank: &crate::record::Rank| Some(rank.waited_for.get(late).copied().unwrap_or(0.0));
                case.by_rank(by, |ranks| Some(ranks.iter().sum())).unwrap_or(0.0)
            })
            .collect();
        let all: f64 = waited.iter().sum();
        let most = waited.iter().copied().enumerate().max_by(|a, b| a.1.total_cmp(&b.1));
        let whom = match most {
            Some((rank, ms)) if all > 0.0 && ms > 1.5 * all / ranks as f64 => {
                format!(" {} of it for rank {rank}, which is the slowest.", share(ms / all))
            }
            Some(_) if all > 0.0 => " No rank stands out.".into(),
            _ => String::new(),
        };
        let text = format!(
            "{}: {} ms a step, {} of it, go by in waiting for ranks that have not begun.{whom}",
            digest.label(case.cell),
            figure(skew),
            share(skew / step.estimate)
        );
        found.push((skew / step.estimate, text));
    }
    found.sort_by(|a, b| b.0.total_cmp(&a.0));
    found.into_iter().map(|(_, text)| (Mark::Found, text)).collect()
}

/// What is missing, and what is doubtful.
fn doubts(digest: &Digest<'_>) -> Statements {
    let mut said = Statements::new();
    let mut kinds: Vec<(String, Vec<String>)> = Vec::new();
    for case in digest.holes() {
        let (word, _) = case.hole();
        let label = digest.label(case.cell);
        match kinds.iter_mut().find(|kind| kind.0 == word) {
            Some(kind) => kind.1.push(label),
            None => kinds.push((word, vec![label])),
        }
    }
    for (word, labels) in kinds {
        let text = format!("{} of {} {word}: {}.", labels.len(), count(digest.cases.len(), "cell"), listed(&labels, 6));
        said.push((Mark::Doubt, text));
    }
    let few: Vec<String> = digest
        .cases
        .iter()
        .filter(|case| case.step.is_some() && case.good.len() < ROUNDS)
        .map(|case| digest.label(case.cell))
        .collect();
    if !few.is_empty() {
        let text = format!(
            "{} fewer than {ROUNDS} good rounds, so that nothing is claimed of them: {}.",
            if few.len() == 1 { "1 cell has".into() } else { format!("{} cells have", few.len()) },
            listed(&few, 6)
        );
        said.push((Mark::Doubt, text));
    }
    let off: Vec<String> = digest
        .cases
        .iter()
        .filter(|case| case.is_flagged(FlagKind::OffTheFormula))
        .map(|case| digest.label(case.cell))
        .collect();
    if !off.is_empty() {
        said.push((Mark::Doubt, format!("What was sent is not what the formula says: {}.", listed(&off, 6))));
    }
    said
}
