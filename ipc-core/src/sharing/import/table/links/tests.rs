use super::*;
use crate::sharing::export::ChannelId;
use crate::wire::Token;
use crate::wire::descriptor::ExportId;

#[test]
fn ended_grants_are_forgotten_with_the_last_link_to_their_exporter() {
    let imports = ImportTable::default();
    let exporter = ProcessIdentity::current().unwrap();
    let [one, other] = [b"one", b"two"].map(|name| BrokerAddress::Abstract(name[..].into()));
    let channel = ChannelId(1);
    let has_ended = || imports.ended.has_any_of(&exporter);
    imports.link_slot(&exporter, &one);
    imports.link_slot(&exporter, &other);
    let grant = (ExportId(1), Token::from_bytes([7; 16]));
    imports.ended.put_back(&exporter, channel, vec![grant]);
    imports.forget_link(&exporter, &one);
    assert!(has_ended(), "another broker of the process may know the grant");
    imports.forget_link(&exporter, &other);
    assert!(!has_ended());
}
