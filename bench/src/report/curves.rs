//! What slower and farther links do.

use rig::plot::{Labels, Point, Scale, curves};
use rig::record::Axis;
use rig::stats::Interval;

use super::case::NETWORK;
use super::charts::{by_strategy, each_group, titled, varies};
use super::digest::{Case, Digest};
use super::html::Page;
use super::links::Traits;

/// Values of x that make a curve; two make a line through anything.
const FEWEST: usize = 3;

/// By which factor values differ at least, to be two.
const APART: f64 = 1.5;

pub(super) fn write(page: &mut Page, digest: &Digest<'_>) {
    if !digest.axes.contains(&Axis::Link) || digest.cases.iter().all(|case| case.step.is_none()) {
        return;
    }
    page.topic("curves", "Step time by rate and round trip of the link");
    page.small(
        "Links differ in more than one property, so a curve over one property also shows the effect of the others. Rates are those of the links' \
         descriptions; round trips are the smallest that connections measured. Links that lose packets are left out, because neither rate nor \
         round trip explains their times.",
    );
    let known = |cases: &[&Case<'_>], pick: fn(&Traits) -> Option<f64>| {
        several(cases.iter().filter_map(|case| on_curve(case, pick)).collect())
    };
    let wanted = |cases: &[&Case<'_>]| {
        varies(cases, Axis::Link) && (known(cases, |traits| traits.rate) || known(cases, |traits| traits.rtt))
    };
    let drawn = each_group(page, digest.groups(&[Axis::Strategy, Axis::Link]), wanted, |page, label, cases| {
        if known(cases, |traits| traits.rate) {
            let title = titled("Step time over the link's rate", label);
            let labels = Labels { title: &title, x: "rate (Mbit/s)", y: "milliseconds a step" };
            chart(page, &labels, cases, |traits| traits.rate, |case| case.step);
        }
        if known(cases, |traits| traits.rtt) {
            let title = titled("Waiting for the network over the round trip", label);
            let labels = Labels { title: &title, x: "round trip (ms)", y: "milliseconds a step that wait" };
            chart(page, &labels, cases, |traits| traits.rtt, |case| case.ms_of(&NETWORK));
        }
    });
    if !drawn {
        page.text(
            "A curve needs three different rates or round trips of links that lose no packets, and there are fewer: the maps above show the links \
             one by one.",
        );
    }
}

/// Whether there are enough values that are really different.
fn several(mut values: Vec<f64>) -> bool {
    values.retain(|value| *value > 0.0);
    values.sort_by(f64::total_cmp);
    let mut apart: Vec<f64> = Vec::new();
    for value in values {
        if apart.last().is_none_or(|last| value > APART * last) {
            apart.push(value);
        }
    }
    apart.len() >= FEWEST
}

/// Where a cell stands, if its link follows from rate and round trip.
fn on_curve(case: &Case<'_>, pick: fn(&Traits) -> Option<f64>) -> Option<f64> {
    pick(&case.traits).filter(|_| !case.traits.lossy)
}

fn chart(
    page: &mut Page,
    labels: &Labels<'_>,
    cases: &[&Case<'_>],
    x: fn(&Traits) -> Option<f64>,
    y: fn(&Case<'_>) -> Option<Interval>,
) {
    let point = |case: &Case<'_>| {
        let Interval { estimate, low, high, .. } = y(case)?;
        Some(Point { x: on_curve(case, x)?, y: estimate, interval: Some((low, high)) })
    };
    let scale = Scale { log_x: true, log_y: true, ..Scale::default() };
    page.figure(labels.title, curves(labels, &by_strategy(cases, point), scale), "Both axes logarithmic.");
}

#[cfg(test)]
mod tests {
    use super::several;

    #[test]
    fn two_links_that_are_much_alike_are_one_place_of_a_curve() {
        assert!(several(vec![1000.0, 100.0, 10.0]) && several(vec![50.0, 0.004, 1.0, 50.1]));
        assert!(!several(vec![50.0, 0.004, 0.005]) && !several(vec![100.0, 1000.0, 100.0]) && !several(Vec::new()));
    }
}
