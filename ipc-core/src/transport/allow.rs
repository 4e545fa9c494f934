//! Which users may talk to this process.

use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::sync::OnceLock;

use super::PeerCredentials;

/// The users and groups that may open this process's exports, or whose exports this process opens, beside its own
/// user. The kernel tells who a peer is (`SO_PEERCRED`); nothing the peer says counts.
///
/// In a user namespace the kernel shows every user whom the namespace does not map under one number, the overflow user id
/// (65534 unless `/proc/sys/kernel/overflowuid` says otherwise). There that number names no one: it is neither this process's
/// own user nor one of the list, and so with groups.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AllowList {
    users: BTreeSet<u32>,
    groups: BTreeSet<u32>,
}

impl AllowList {
    /// Only the user of this process.
    pub const fn own_user() -> Self {
        Self { users: BTreeSet::new(), groups: BTreeSet::new() }
    }

    /// Adds a user id.
    pub fn user(mut self, uid: u32) -> Self {
        self.users.insert(uid);
        self
    }

    /// Adds a group id (the peer's effective one).
    pub fn group(mut self, gid: u32) -> Self {
        self.groups.insert(gid);
        self
    }

    /// Adds the users and groups of another list.
    pub(crate) fn extend(&mut self, other: &Self) {
        self.users.extend(&other.users);
        self.groups.extend(&other.groups);
    }

    pub(crate) fn permits(&self, peer: &PeerCredentials) -> bool {
        is_own_user(peer.uid) || self.lists(peer)
    }

    /// Returns whether a user or a group of the list permits the peer.
    pub(crate) fn lists(&self, peer: &PeerCredentials) -> bool {
        self.users.contains(&peer.uid) && !Ids::users().is_unmapped(peer.uid)
            || self.groups.contains(&peer.gid) && !Ids::groups().is_unmapped(peer.gid)
    }
}

/// Returns whether this is the user of this process.
pub(crate) fn is_own_user(uid: u32) -> bool {
    uid == rustix::process::geteuid().as_raw() && !Ids::users().is_unmapped(uid)
}

/// A user id, for errors.
#[derive(Clone, Copy, Debug)]
pub(crate) struct UserName(pub(crate) u32);

impl fmt::Display for UserName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "user {}", self.0)?;
        if Ids::users().is_unmapped(self.0) {
            f.write_str(" (in this user namespace every user whom it does not map)")?;
        }
        Ok(())
    }
}

/// The ids of this process, as the kernel shows them to it.
#[derive(Clone, Copy, Debug)]
struct Ids {
    /// The number for all that are not mapped. `None` where all are.
    overflow: Option<u32>,
}

impl Ids {
    /// Read once: a process with several threads, as every one with a poller, cannot change its user namespace.
    fn users() -> Self {
        static USERS: OnceLock<Ids> = OnceLock::new();
        *USERS.get_or_init(|| Self::read("/proc/self/uid_map", "/proc/sys/kernel/overflowuid"))
    }

    fn groups() -> Self {
        static GROUPS: OnceLock<Ids> = OnceLock::new();
        *GROUPS.get_or_init(|| Self::read("/proc/self/gid_map", "/proc/sys/kernel/overflowgid"))
    }

    fn read(map: &str, overflow: &str) -> Self {
        let overflow = fs::read_to_string(overflow).ok().and_then(|text| text.trim().parse().ok());
        // An unreadable value is assumed to be the kernel's default, in a namespace.
        let all_mapped = fs::read_to_string(map).is_ok_and(|map| maps_all(&map));
        Self { overflow: (!all_mapped).then(|| overflow.unwrap_or(OVERFLOW_DEFAULT)) }
    }

    fn is_unmapped(self, id: u32) -> bool {
        self.overflow == Some(id)
    }
}

/// The kernel's `DEFAULT_OVERFLOWUID`.
const OVERFLOW_DEFAULT: u32 = 65534;

/// Returns whether a `uid_map` (user_namespaces(7)) has one line with all ids that there are, as that of the initial namespace
/// has. The last number, -1, is no id.
fn maps_all(map: &str) -> bool {
    let mut fields = map.split_whitespace();
    let first = fields.next() == Some("0");
    first && fields.nth(1).and_then(|count| count.parse().ok()) == Some(u32::MAX) && fields.next().is_none()
}

#[cfg(test)]
mod tests;
