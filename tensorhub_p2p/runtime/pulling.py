"""(being written)"""
class PullRun:
    def __init__(self,*a): pass
