use super::*;

#[test]
fn view_sees_every_drop_and_is_read_only() {
    let epoch = Epoch::create().unwrap();
    let file = epoch.file().try_clone_to_owned().unwrap();
    let view = EpochView::open(&file).unwrap();
    assert_eq!(view.read(), 0);
    epoch.advance();
    epoch.advance();
    assert_eq!(view.read(), 2);
    assert!(EpochPage::map(file.as_fd(), ProtFlags::READ | ProtFlags::WRITE).is_err());
    assert!(ftruncate(&file, 0).is_err());
}

#[test]
fn file_that_can_be_cut_short_is_rejected() {
    let short = memfd_create("short", MemfdFlags::ALLOW_SEALING).unwrap();
    fcntl_add_seals(&short, SealFlags::SHRINK).unwrap();
    assert!(EpochView::open(&short).is_none());
    let unsealed = memfd_create("unsealed", MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&unsealed, BYTES as u64).unwrap();
    assert!(EpochView::open(&unsealed).is_none());
}
