//! The shares of peers in limited resources, and the choice of a waiting connection that is closed for a further one.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::process::{Resource, getrlimit};

use super::PeerCredentials;

/// Returns this process's limit of open files.
pub(crate) fn descriptor_limit() -> usize {
    let limit = getrlimit(Resource::Nofile).current;
    limit.and_then(|limit| usize::try_from(limit).ok()).unwrap_or(usize::MAX)
}

/// A resource of this process that peers consume: a process gets a quarter of it at most, and each user other than this process's
/// own a half. Processes of other pid namespaces, which have no number here, count as one for each user.
#[derive(Debug)]
pub(crate) struct Budget {
    /// The plural name of the units, for errors.
    name: &'static str,
    /// The number of units, which may depend on a limit of the process.
    total: fn() -> usize,
    /// The number of units that each process has, by its user and its id.
    held: Mutex<BTreeMap<(u32, u32), usize>>,
}

/// One unit of a [`Budget`], until it is dropped.
#[derive(Debug)]
pub(crate) struct Allotment {
    budget: &'static Budget,
    holder: (u32, u32),
}

impl Budget {
    pub(crate) const fn new(name: &'static str, total: fn() -> usize) -> Self {
        Self { name, total, held: Mutex::new(BTreeMap::new()) }
    }

    /// Takes a unit for a peer. The error states the exceeded limit.
    pub(crate) fn take(&'static self, peer: &PeerCredentials) -> Result<Allotment, String> {
        let (name, holder) = (self.name, (peer.uid, peer.pid));
        let total = (self.total)();
        let mut held = self.lock();
        let of_process = held.get(&holder).copied().unwrap_or(0);
        let most = (total / 4).max(1);
        if of_process >= most {
            return Err(format!("process {} has {of_process} {name} of at most {most}", peer.pid));
        }
        let of_user: usize = held.range((peer.uid, 0)..=(peer.uid, u32::MAX)).map(|(_, held)| held).sum();
        let is_own = peer.uid == rustix::process::geteuid().as_raw();
        let most = if is_own { total } else { total.div_ceil(2) };
        if of_user >= most {
            return Err(format!(
                "the processes of user {} have {of_user} {name} of at most {most}",
                peer.uid
            ));
        }
        let of_all: usize = held.values().sum();
        if of_all >= total {
            return Err(format!("all processes have {of_all} {name} of at most {total}"));
        }
        *held.entry(holder).or_default() += 1;
        Ok(Allotment { budget: self, holder })
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<(u32, u32), usize>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Allotment {
    fn drop(&mut self) {
        let mut held = self.budget.lock();
        if let Some(count) = held.get_mut(&self.holder) {
            *count -= 1;
            if *count == 0 {
                held.remove(&self.holder);
            }
        }
    }
}

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
    use super::{Budget, PeerCredentials, greediest};

    fn peer(uid: u32, pid: u32) -> PeerCredentials {
        PeerCredentials { pid, uid, gid: uid }
    }

    #[test]
    fn process_and_user_get_their_shares_only() {
        static BUDGET: Budget = Budget::new("units", || 16);
        let own = rustix::process::geteuid().as_raw();
        let of = |uid, pid| std::iter::from_fn(move || BUDGET.take(&peer(uid, pid)).ok());
        let first: Vec<_> = of(own + 1, 1).collect();
        assert_eq!(first.len(), 4);
        assert_eq!(BUDGET.take(&peer(own + 1, 1)).unwrap_err(), "process 1 has 4 units of at most 4");
        let second: Vec<_> = (2..9).flat_map(|pid| of(own + 1, pid)).collect();
        assert_eq!(first.len() + second.len(), 8);
        let error = BUDGET.take(&peer(own + 1, 9)).unwrap_err();
        assert_eq!(error, format!("the processes of user {} have 8 units of at most 8", own + 1));
        // The other half is left.
        let others: Vec<_> = (1..9).flat_map(|pid| of(own, pid)).collect();
        assert_eq!(others.len(), 8);
        assert_eq!(BUDGET.take(&peer(own + 2, 1)).unwrap_err(), "all processes have 16 units of at most 16");
        drop((first, second, others));
        assert!(BUDGET.lock().is_empty());
    }

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
