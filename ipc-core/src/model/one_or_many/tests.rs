use super::*;

#[test]
fn elements_are_kept_in_order() {
    let mut list = OneOrMany::NONE;
    for count in 0..4 {
        assert_eq!(*list, *(0..count).collect::<Vec<_>>());
        assert_eq!(list, (0..count).collect());
        list.push(count);
    }
    let mut seen = Vec::new();
    list.for_each(|element| seen.push(element));
    assert_eq!(seen, [0, 1, 2, 3]);
}
