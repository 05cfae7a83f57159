from cluster import *
import pytest
@pytest.mark.parametrize("seed", range(10))
def test_a(seed):
    c=Cluster(seed, 6)
    T=c.form(TRAINER,[0,1]); R=c.form(ROLLOUT,[2,3])
    a=[c.ask(2,R[0]),c.ask(3,R[1])]
    c.publish_all(TRAINER,[0,1],1)
    x=c.wait(*a); print(x)
    for p,s in ((2,R[0]),(3,R[1])):
        c.wait(c.hold(p,s,x[0])); assert c.finish(p,s,x[0]) is None
    c.wait(c.unpublish(0,T[0]),c.unpublish(1,T[1]))
    c.publish_all(TRAINER,[0,1],2)
    assert c.replicate_all(ROLLOUT,[2,3]).publication.version==2
    c.crash(3)
    print(c.errors(c.ask(2,R[0],timeout=20)))
    n=c.start()
    k=c.ask(2,R[0],timeout=30)
    c.wait(c.open(n,R[1],timeout=30))
    print(c.wait(k,c.ask(n,R[1])))
