//! Which strategy is fastest.

use rig::record::Axis;
use rig::stats::Interval;

use super::super::case::ROUNDS;
use super::super::digest::{Case, Comparison, Digest, Grouped};
use super::super::html::{Page, Table};
use super::super::text::{interval, listed};

/// Surely no slower than by so much is as good as the fastest.
const CLOSE: f64 = 1.1;

/// Others that are named one by one.
const NAMED: usize = 4;

/// For each link, number of ranks and transport: the fastest strategy, those that are not told apart from it, and the next.
pub(super) fn write(page: &mut Page, digest: &Digest<'_>) {
    let head =
        ["link", "ranks", "over", "fastest", "step (ms)", "not told apart from it", "first that is slower", "caution"];
    let (mut own, mut shared) = (Table::new(&head, head.len()), Table::new(&head, head.len()));
    for Grouped { like, cases, .. } in digest.groups(&[Axis::Strategy]) {
        let Some(front) = Front::of(&cases) else { continue };
        let crowd = cases.iter().find_map(|case| case.crowd.clone());
        let over = digest.label_without(like, &[Axis::Strategy, Axis::Link, Axis::Ranks]);
        let over = if over.is_empty() { like.transport.clone() } else { over };
        let table = if crowd.is_some() { &mut shared } else { &mut own };
        let ranks = crowd.unwrap_or(like.ranks.to_string());
        table.row([vec![like.link.clone(), ranks, over], front.row()].concat());
    }
    if own.rows.is_empty() && shared.rows.is_empty() {
        return;
    }
    page.topic("ranking", "The fastest strategy in each comparison");
    page.small(
        "Each line compares the strategies over one transport on one link. ● the fastest is told apart from all others; ○ it is not. Too noisy to \
         rank: half of the others or more may be as fast, or may be more than 10 % slower.",
    );
    if !own.rows.is_empty() {
        page.table(&own);
    }
    match (shared.rows.is_empty(), own.rows.is_empty()) {
        (true, _) => {}
        (false, true) => page.table(&shared),
        (false, false) => page.folded_table("Where ranks share cores", &shared),
    }
}

/// The strategies of a group, by the shortest step.
pub(super) struct Front<'c> {
    pub(super) best: &'c str,
    step: Interval,
    /// Where the fastest had fewer ends of the link than ranks: how many.
    ends: Option<String>,
    /// The others, from the fastest on.
    others: Vec<(&'c str, Comparison)>,
    /// Strategies with too few rounds.
    few: Vec<String>,
}

impl<'c> Front<'c> {
    /// Of cells that differ in strategy alone; `None` where there are not two to compare.
    pub(super) fn of(cases: &[&'c Case<'_>]) -> Option<Self> {
        let mut timed: Vec<(&'c Case<'_>, Interval)> =
            cases.iter().filter_map(|case| Some((*case, case.step?))).collect();
        timed.sort_by(|a, b| a.1.estimate.total_cmp(&b.1.estimate));
        let (all, few): (Vec<_>, Vec<_>) = timed.into_iter().partition(|(case, _)| case.good.len() >= ROUNDS);
        let ((best, step), rest) = all.split_first()?;
        let against = |(case, _): &(&'c Case<'_>, Interval)| {
            let comparison = case.against(best).filter(|comparison| comparison.rounds >= ROUNDS)?;
            Some((case.cell.strategy.as_str(), comparison))
        };
        let others: Vec<(&str, Comparison)> = rest.iter().filter_map(against).collect();
        (!others.is_empty()).then(|| Front {
            best: &best.cell.strategy,
            step: *step,
            ends: best.shared_ends(),
            others,
            few: few.iter().map(|(case, _)| case.cell.strategy.clone()).collect(),
        })
    }

    /// Those that are not told apart from the fastest.
    fn near(&self) -> impl Iterator<Item = &(&'c str, Comparison)> {
        self.others.iter().filter(|(_, comparison)| comparison.verdict <= 0)
    }

    /// Whether the fastest is told apart from all others.
    pub(super) fn is_clear(&self) -> bool {
        self.near().next().is_none()
    }

    /// Whether intervals are too wide to say who is among the fastest.
    pub(super) fn is_noisy(&self) -> bool {
        let vague = self.near().filter(|(_, comparison)| comparison.ratio.high > CLOSE).count();
        2 * vague >= self.others.len()
    }

    /// The fastest, and what is known of it.
    pub(super) fn words(&self) -> String {
        let near: Vec<String> =
            self.near().map(|(name, comparison)| format!("{name} {}", comparison.times())).collect();
        let ends = self.ends.as_ref().map_or(String::new(), |ends| format!(" ({ends})"));
        let (best, step) = (self.best, interval(&self.step));
        if self.is_noisy() {
            return format!(
                "the strategies cannot be told apart; the shortest mean step is that of {best}{ends}, {step} ms"
            );
        }
        if near.is_empty() {
            return format!("{best}{ends} is the fastest with {step} ms a step");
        }
        format!("{best}{ends} has the shortest step with {step} ms, but {} may be as fast", listed(&near, NAMED))
    }

    /// From the fastest strategy on.
    fn row(&self) -> Vec<String> {
        let one = |(name, comparison): &(&str, Comparison)| format!("{name} {}", comparison.times());
        let near: Vec<String> = self.near().map(one).collect();
        let slower = self.others.iter().find(|(_, comparison)| comparison.verdict > 0);
        let mut beware: Vec<String> = Vec::new();
        if self.is_noisy() {
            beware.push("too noisy to rank".into());
        }
        beware.extend(self.ends.iter().map(|ends| format!("{} has {ends}", self.best)));
        if !self.few.is_empty() {
            beware.push(format!("fewer than {ROUNDS} good rounds of {}", self.few.join(", ")));
        }
        vec![
            format!("{}\u{a0}{}", if self.is_clear() { "●" } else { "○" }, self.best),
            interval(&self.step),
            if near.is_empty() { "–".into() } else { listed(&near, NAMED) },
            slower.map_or("–".into(), one),
            beware.join("; "),
        ]
    }
}
