//! What is missing, what is doubtful, and what a comparison must not be taken for.

use std::collections::BTreeSet;

use rig::flag::FlagKind;

use super::super::case::ROUNDS;
use super::super::digest::{Case, Digest, distinct};
use super::super::html::Mark;
use super::super::text::{count, listed};
use super::congestion::others;
use super::network::is_networked;
use super::statements::Statements;

/// What bears upon all that is said: how many runs are doubted and why, strategies that had another link, connections that ran otherwise
/// than asked.
pub(super) fn first(digest: &Digest<'_>) -> Statements {
    let texts = [rounds(digest), left_out(digest), runs(digest), neighbours(digest), others(digest)];
    texts.into_iter().flatten().map(|text| (Mark::Doubt, text)).collect()
}

/// Too few rounds for anything.
fn rounds(digest: &Digest<'_>) -> Option<String> {
    let most = digest.cases.iter().map(|case| case.good.len()).max()?;
    (most < ROUNDS).then(|| {
        format!("No cell has {ROUNDS} good rounds, so step times of cells are not compared and have no interval.")
    })
}

/// Cells that the short answer leaves out.
fn left_out(digest: &Digest<'_>) -> Option<String> {
    let has = |crowded: bool| digest.cases.iter().any(|case| is_networked(case) && case.crowd.is_some() == crowded);
    (has(true) && has(false)).then(|| {
        "The sentences of this page leave out cells whose ranks share cores, because these ranks also wait for the processor."
            .into()
    })
}

/// Doubts that are of the machine rather than of a cell.
fn runs(digest: &Digest<'_>) -> Option<String> {
    let doubted = |kind: FlagKind| {
        let rounds = |case: &Case<'_>| {
            let rounds = case.flags.iter().filter(|(_, flag)| flag.kind == kind).map(|(round, _)| *round);
            rounds.collect::<BTreeSet<u32>>().len()
        };
        digest.cases.iter().map(rounds).sum::<usize>()
    };
    let crowds = distinct(digest.cases.iter().filter_map(|case| case.crowd.clone()));
    let kinds = [
        (FlagKind::SharedCores, format!("had ranks that shared cores ({})", listed(&crowds, 4))),
        (FlagKind::MachineBusy, "ran on a busy machine".into()),
        (FlagKind::ClockMoved, "ran while the processor's clock changed".into()),
        (FlagKind::NoSteadyState, "never settled".into()),
    ];
    let told = kinds.into_iter().map(|(kind, what)| (doubted(kind), what)).filter(|(runs, _)| *runs > 0);
    let told: Vec<String> = told.map(|(runs, what)| format!("{runs} {what}")).collect();
    (!told.is_empty()).then(|| format!("Of {}, {}.", count(digest.results.records.len(), "run"), told.join(", ")))
}

/// Strategies whose neighbours stood behind one end of the link, where others' did not.
fn neighbours(digest: &Digest<'_>) -> Option<String> {
    let sharing: Vec<(&str, String)> =
        digest.cases.iter().filter_map(|case| Some((case.cell.strategy.as_str(), case.shared_ends()?))).collect();
    let alone = digest.cases.iter().any(|case| case.ends().is_some_and(|ends| ends == case.cell.ranks && ends > 1));
    let names = distinct(sharing.iter().map(|(name, _)| name.to_string()));
    let ends = distinct(sharing.iter().map(|(_, ends)| ends.clone()));
    (alone && !sharing.is_empty()).then(|| {
        format!(
            "{}: neighbouring ranks form a node, and so share an end of the link ({}). They communicate through memory, while the ranks of \
             other strategies send over the link. If this strategy is the fastest, this is one reason.",
            listed(&names, 4),
            listed(&ends, 4)
        )
    })
}

/// What is missing, and which cells are doubted.
pub(super) fn all(digest: &Digest<'_>) -> Statements {
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
    let labels = |wanted: &dyn Fn(&Case<'_>) -> bool| {
        let wanted = digest.cases.iter().filter(|case| wanted(case));
        wanted.map(|case| digest.label(case.cell)).collect::<Vec<String>>()
    };
    let few = labels(&|case| case.step.is_some() && case.good.len() < ROUNDS);
    if !few.is_empty() {
        let text = format!(
            "{} fewer than {ROUNDS} good rounds, so nothing is concluded from their step times: {}.",
            if few.len() == 1 { "1 cell has".into() } else { format!("{} cells have", few.len()) },
            listed(&few, 6)
        );
        said.push((Mark::Doubt, text));
    }
    let off = labels(&|case| case.is_flagged(FlagKind::OffTheFormula));
    if !off.is_empty() {
        said.push((Mark::Doubt, format!("What was sent is not what the formula says: {}.", listed(&off, 6))));
    }
    let unsettled = labels(&|case| case.is_flagged(FlagKind::NoSteadyState));
    if !unsettled.is_empty() {
        let text = format!(
            "In some run of {} steps never settled: {}.",
            count(unsettled.len(), "cell"),
            listed(&unsettled, 6)
        );
        said.push((Mark::Doubt, text));
    }
    said
}
