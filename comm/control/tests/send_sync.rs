//! Which public types are `Send` and `Sync`.

use hsdp_control::{
    Bind, Bootstrap, Client, ClientOptions, ControlError, Deadlines, Job, Joined, Loss, Member,
    Membership, Secret, Server, ServerOptions, State, Status, Subject, Terms,
};

fn everywhere<T: Send + Sync + 'static>() {}

#[test]
fn the_table() {
    everywhere::<Server>();
    everywhere::<Bind>();
    everywhere::<Client>();
    everywhere::<Subject>();
    everywhere::<ServerOptions>();
    everywhere::<ClientOptions>();
    everywhere::<Membership>();
    everywhere::<Bootstrap>();
    everywhere::<Joined>();
    everywhere::<Job>();
    everywhere::<Terms>();
    everywhere::<Member>();
    everywhere::<Secret>();
    everywhere::<Deadlines>();
    everywhere::<Status>();
    everywhere::<State>();
    everywhere::<Loss>();
    everywhere::<ControlError>();
}
