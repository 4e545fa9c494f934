//! The choice of a waiting connection that is closed for a further one.

/// Returns the oldest element of the member that has the most, of the group that has the most; the oldest element is the first.
///
/// So a process, or a host, that connects repeatedly closes its own connections.
pub(crate) fn greediest<G: PartialEq, M: PartialEq>(waiting: &[(G, M)]) -> Option<usize> {
    let share = |index: &usize| {
        let (group, member) = &waiting[*index];
        let of_group = waiting.iter().filter(|(other, _)| other == group);
        let of_member = of_group.clone().filter(|(_, other)| other == member).count();
        (of_group.count(), of_member, std::cmp::Reverse(*index))
    };
    (0..waiting.len()).max_by_key(share)
}

#[cfg(test)]
mod tests {
    use super::greediest;

    #[test]
    fn member_with_most_connections_loses_its_oldest() {
        assert_eq!(greediest::<u32, u32>(&[]), None);
        // User 7's process 2 has connected most often, but user 8 has more connections in all.
        let waiting = [(7, 1), (7, 2), (7, 2), (8, 3), (8, 4), (8, 5), (8, 5)];
        assert_eq!(greediest(&waiting), Some(5));
        assert_eq!(greediest(&waiting[..3]), Some(1));
        // Equal shares: the oldest.
        assert_eq!(greediest(&[(1, 1), (2, 2)]), Some(0));
    }
}
