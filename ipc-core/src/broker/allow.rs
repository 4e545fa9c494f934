//! Which users may talk to this process.

use std::collections::BTreeSet;

use super::PeerCredentials;

/// The users and groups that may open this process's exports, or whose exports this process opens, beside its own
/// user. The kernel tells who a peer is (`SO_PEERCRED`); nothing the peer says counts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AllowList {
    users: BTreeSet<u32>,
    groups: BTreeSet<u32>,
}

impl AllowList {
    /// Nobody but this process's own user.
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

    pub(crate) fn permits(&self, peer: &PeerCredentials) -> bool {
        peer.uid == rustix::process::geteuid().as_raw()
            || self.users.contains(&peer.uid)
            || self.groups.contains(&peer.gid)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stranger_is_permitted_only_when_listed() {
        let own = rustix::process::geteuid().as_raw();
        let stranger = PeerCredentials { pid: 1, uid: own + 1, gid: 77 };
        assert!(AllowList::own_user().permits(&PeerCredentials { uid: own, ..stranger }));
        assert!(!AllowList::own_user().permits(&stranger));
        assert!(AllowList::own_user().user(own + 1).permits(&stranger));
        assert!(AllowList::own_user().group(77).permits(&stranger));
        assert!(!AllowList::own_user().user(own + 2).group(78).permits(&stranger));
    }
}
