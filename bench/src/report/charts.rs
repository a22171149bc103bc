//! What charts of several sections have in common.

use rig::plot::{COLOURS, Curve, Point};
use rig::record::Axis;

use super::digest::{Case, Grouped, distinct};
use super::html::Page;
use super::order::{STRATEGIES, known};

/// Groups of cells whose charts are shown before the rest is folded.
const SHOWN: usize = 2;

/// Writes something for each group that is wanted, the later groups folded; false if none is.
pub(super) fn each_group<'a, 'd>(
    page: &mut Page,
    groups: Vec<Grouped<'a, 'd>>,
    wanted: impl Fn(&[&Case<'a>]) -> bool,
    mut write: impl FnMut(&mut Page, &str, &[&'d Case<'a>]),
) -> bool {
    let groups: Vec<Grouped<'a, 'd>> = groups.into_iter().filter(|group| wanted(&group.cases)).collect();
    for (index, Grouped { label, cases, .. }) in groups.iter().enumerate() {
        let title = if label.is_empty() { "all cells" } else { label };
        if index < SHOWN {
            if groups.len() > 1 {
                page.heading(title);
            }
            write(page, label, cases);
        } else {
            page.folded(title, |page| write(page, label, cases));
        }
    }
    !groups.is_empty()
}

/// `Title: label`, or the title alone.
pub(super) fn titled(title: &str, label: &str) -> String {
    if label.is_empty() { title.to_string() } else { format!("{title}: {label}") }
}

/// A strategy's line: always of the same colour and mark, on every chart.
pub(super) fn curve(strategy: &str, points: Vec<Point>) -> Curve {
    let number = match known(&STRATEGIES, strategy) {
        // Names that are not known share what is left, by their letters.
        unknown if unknown == STRATEGIES.len() => unknown + strategy.bytes().map(usize::from).sum::<usize>() % 7,
        number => number,
    };
    Curve {
        name: strategy.to_string(),
        points,
        colour: number % COLOURS,
        dashed: number % 2 == 1 || number >= 8,
        width: 2.0,
        mark: Some(number % 6),
    }
}

/// One line a strategy through what `point` makes of its cells.
pub(super) fn by_strategy(cases: &[&Case<'_>], point: impl Fn(&Case<'_>) -> Option<Point>) -> Vec<Curve> {
    let strategies = distinct(cases.iter().map(|case| case.cell.strategy.as_str()));
    let line = |strategy: &str| {
        let mut points: Vec<Point> =
            cases.iter().filter(|case| case.cell.strategy == strategy).filter_map(|case| point(case)).collect();
        points.sort_by(|a, b| a.x.total_cmp(&b.x));
        curve(strategy, points)
    };
    strategies.into_iter().map(line).collect()
}

/// Whether cells differ on an axis.
pub(super) fn varies(cases: &[&Case<'_>], axis: Axis) -> bool {
    distinct(cases.iter().map(|case| case.cell.value(axis))).len() > 1
}

/// Strategy, and transport where cells differ in it.
pub(super) fn name(case: &Case<'_>, transports: bool) -> String {
    let strategy = &case.cell.strategy;
    if transports { format!("{strategy} · {}", case.cell.transport) } else { strategy.clone() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_strategies_look_alike() {
        let looks = STRATEGIES.map(|name| curve(name, Vec::new())).map(|line| (line.colour, line.dashed, line.mark));
        assert_eq!(distinct(looks.iter()).len(), STRATEGIES.len(), "{looks:?}");
        // Those beyond the colours there are differ from the ones of the same colour in more than one way.
        assert_eq!(distinct(looks.iter().map(|look| look.0)).len(), COLOURS);
    }
}
