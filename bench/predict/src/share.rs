//! Who gets how much of what several want at the same time: max-min fair shares.
//!
//! An activity, a message on its way or a computation, has a rate (bytes or seconds of work a second) and takes from each resource that it uses, a
//! link's direction or a processor, in proportion to it. No resource gives more than it has, and none of its users could get more without one that
//! gets no more than itself getting less. So flows of a link share its rate evenly, but for those that are held back elsewhere; and threads
//! share processors as an operating system's fair scheduler has them, where one that wants little gets that at once.

/// What an activity takes.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Demand {
    /// Most that its rate can be, for reasons of its own.
    pub(crate) most: f64,
    pub(crate) uses: Vec<Use>,
}

/// A resource that an activity uses.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Use {
    pub(crate) resource: usize,
    /// Of the resource, for each unit of rate, of one user.
    pub(crate) each: f64,
    /// As how many users it competes there: an activity may stand for many that are alike.
    pub(crate) users: f64,
}

/// Within which two rates are the same.
const SAME: f64 = 1.0 + 1e-9;

/// The rate of each activity.
pub(crate) fn rates<'a>(demands: impl Iterator<Item = &'a Demand>, capacities: &[f64]) -> Vec<f64> {
    let demands: Vec<&Demand> = demands.collect();
    let mut rates = vec![0.0; demands.len()];
    let mut left = capacities.to_vec();
    let mut users = vec![0.0; capacities.len()];
    for each in demands.iter().flat_map(|demand| &demand.uses) {
        users[each.resource] += each.users;
    }
    let mut open: Vec<usize> = (0..demands.len()).collect();
    let mut is_open = vec![true; demands.len()];
    let mut level = vec![0.0; capacities.len()];
    while !open.is_empty() {
        for (level, (left, users)) in level.iter_mut().zip(left.iter().zip(&users)) {
            *level = f64::max(*left, 0.0) / users;
        }
        let fair = |each: &Use| level[each.resource] / each.each;
        for index in &open {
            let demand = demands[*index];
            rates[*index] = demand.uses.iter().map(fair).fold(demand.most, f64::min);
        }
        let settled = settled(&open, &demands, &rates, &level);
        for index in &settled {
            is_open[*index] = false;
            for each in &demands[*index].uses {
                left[each.resource] -= rates[*index] * each.each * each.users;
                users[each.resource] -= each.users;
            }
        }
        open.retain(|index| is_open[*index]);
    }
    rates
}

/// Of those whose rates are open, some that keep what they would get now: in this order those that want no more, the users of a resource that
/// holds all of them back, and the one that is held back most.
fn settled(open: &[usize], demands: &[&Demand], rates: &[f64], level: &[f64]) -> Vec<usize> {
    let content: Vec<usize> = open.iter().copied().filter(|index| rates[*index] >= demands[*index].most).collect();
    if !content.is_empty() {
        return content;
    }
    let mut is_free = vec![false; level.len()];
    let held_at = |index: usize, each: &Use| level[each.resource] / each.each <= rates[index] * SAME;
    for index in open {
        for each in demands[*index].uses.iter().filter(|each| !held_at(*index, each)) {
            is_free[each.resource] = true;
        }
    }
    let by_full = |index: &usize| demands[*index].uses.iter().any(|each| !is_free[each.resource]);
    let held: Vec<usize> = open.iter().copied().filter(by_full).collect();
    if !held.is_empty() {
        return held;
    }
    let alone = |index: usize| {
        let of_all = demands[index].uses.iter().map(|each| level[each.resource] / each.each);
        rates[index] / of_all.fold(0.0, f64::max)
    };
    open.iter().copied().min_by(|a, b| alone(*a).total_cmp(&alone(*b))).into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn demand(most: f64, uses: &[(usize, f64, f64)]) -> Demand {
        let each =
            |(resource, each, users): &(usize, f64, f64)| Use { resource: *resource, each: *each, users: *users };
        Demand { most, uses: uses.iter().map(each).collect() }
    }

    fn assert_rates(demands: &[Demand], capacities: &[f64], expected: &[f64]) {
        let rates = rates(demands.iter(), capacities);
        let near =
            rates.iter().zip(expected).all(|(rate, expected)| (rate - expected).abs() < 1e-9 * expected.max(1.0));
        assert!(near && rates.len() == expected.len(), "{rates:?}, not {expected:?}");
    }

    #[test]
    fn flows_share_evenly_what_those_that_are_held_back_elsewhere_leave() {
        // Two flows into one receiver, of which one also goes through a narrow sender, and a third from a wide sender elsewhere.
        let flow = |from, to| demand(f64::INFINITY, &[(from, 1.0, 1.0), (to, 1.0, 1.0)]);
        assert_rates(&[flow(0, 2), flow(1, 2)], &[10.0, 100.0, 100.0], &[10.0, 90.0]);
        // One link for three.
        assert_rates(&[flow(0, 1), flow(0, 2), flow(0, 3)], &[90.0, 100.0, 100.0, 10.0], &[40.0, 40.0, 10.0]);
    }

    #[test]
    fn an_activity_that_stands_for_many_counts_as_many() {
        let many = demand(f64::INFINITY, &[(0, 1.0, 3.0)]);
        let one = demand(f64::INFINITY, &[(0, 1.0, 1.0)]);
        assert_rates(&[many, one], &[100.0], &[25.0, 25.0]);
    }

    #[test]
    fn a_processor_gives_those_that_want_little_all_that_they_want() {
        // Two threads compute on two cores, and a flow of 100 bytes a second takes a hundredth of one.
        let compute = demand(1.0, &[(0, 1.0, 1.0)]);
        let flow = demand(f64::INFINITY, &[(1, 1.0, 1.0), (0, 1e-4, 1.0)]);
        assert_rates(&[compute.clone(), compute, flow], &[2.0, 100.0], &[0.995, 0.995, 100.0]);
        // Three threads on two cores.
        let compute = || demand(1.0, &[(0, 1.0, 1.0)]);
        assert_rates(&[compute(), compute(), compute()], &[2.0], &[2.0 / 3.0; 3]);
    }

    #[test]
    fn nothing_is_given_twice() {
        // Two activities that want two things in opposite proportions: neither resource holds both back first.
        let one = demand(f64::INFINITY, &[(0, 1.0, 1.0), (1, 3.0, 1.0)]);
        let other = demand(f64::INFINITY, &[(0, 3.0, 1.0), (1, 1.0, 1.0)]);
        let rates = rates([&one, &other].into_iter(), &[12.0, 12.0]);
        assert!(rates[0] + 3.0 * rates[1] <= 12.0 + 1e-9 && 3.0 * rates[0] + rates[1] <= 12.0 + 1e-9, "{rates:?}");
        assert!(rates[0] >= 2.0 - 1e-9 && rates[1] >= 2.0 - 1e-9, "{rates:?}");
    }
}
