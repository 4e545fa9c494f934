use super::*;

#[test]
fn unlisted_user_is_not_permitted() {
    let own = rustix::process::geteuid().as_raw();
    let stranger = PeerCredentials { pid: 1, uid: own + 1, gid: 77 };
    assert!(AllowList::own_user().permits(&PeerCredentials { uid: own, ..stranger }));
    assert!(!AllowList::own_user().permits(&stranger));
    assert!(AllowList::own_user().user(own + 1).permits(&stranger));
    assert!(AllowList::own_user().group(77).permits(&stranger));
    assert!(!AllowList::own_user().user(own + 2).group(78).permits(&stranger));
}

#[test]
fn map_with_one_line_of_all_ids_maps_all() {
    assert!(maps_all("         0          0 4294967295\n"));
    for part in
        ["", "0 1000 1\n", "0 0 65536\n", "0 0 4294967294\n", "65534 0 1\n", "0 0 1\n1 1 4294967294\n"]
    {
        assert!(!maps_all(part), "{part:?}");
    }
}
